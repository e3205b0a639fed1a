#!/usr/bin/env bash
# Builds the image.  `make image` calls this; every setting is an environment variable:
#   BUILDER    docker (BuildKit) or buildah                              [docker]
#   BASE       a base of docker/base-images.json                         [its default]
#   BACKEND    tensorrt, or tensorrt_rtx, which needs no GPU             [tensorrt]
#   CALIBRATE  1 adds ModelOpt and torch, for fp8 calibration            [0]
#   TAG        the image's name                                          [sa3-builder:VERSION]
#   NO_CACHE   1 builds every layer anew                                 [0]
#   BASE_IMAGE, BASE_DIGEST, TENSORRT_VERSION replace what BASE stands for
# The package index that pip is configured to use here, and the certificate it trusts, are handed to the build
# as secrets.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

builder=${BUILDER:-docker}
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' engine_builder/__init__.py)
tag=${TAG:-sa3-builder:$version}

export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
if ! git diff --quiet HEAD -- . 2>/dev/null; then revision+=-modified; fi

arguments=(
    --build-arg "BACKEND=${BACKEND:-tensorrt}"
    --build-arg "CALIBRATE=${CALIBRATE:-0}"
    --build-arg "VERSION=$version"
    --build-arg "REVISION=$revision"
    --build-arg "CREATED=$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)"
    --build-arg "SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH"
)
if [ -n "${BASE_IMAGE:-}" ]; then
    arguments+=(
        --build-arg "BASE_IMAGE=$BASE_IMAGE"
        --build-arg "BASE_DIGEST=${BASE_DIGEST:-unresolved}"
        --build-arg "TENSORRT_VERSION=${TENSORRT_VERSION:-}"
    )
else
    base=$(python3 docker/base_images.py args "${BASE:-}")
    while read -r line; do arguments+=(--build-arg "$line"); done <<< "$base"
fi

secrets=$(mktemp -d)
trap 'rm -rf "$secrets"' EXIT
configured() { python3 -m pip config get "$1" 2>/dev/null || true; }
index=${PIP_INDEX_URL:-$(configured global.index-url)}
printf '[global]\ntimeout = 180\n%s' "${index:+index-url = $index
}" > "$secrets/pip.conf"
ca=${PIP_CERT:-$(configured global.cert)}
cat "${ca:-/dev/null}" > "$secrets/ca.pem"
arguments+=(--secret "id=pip,src=$secrets/pip.conf" --secret "id=ca,src=$secrets/ca.pem")
if [ "${NO_CACHE:-0}" = 1 ]; then arguments+=(--no-cache); fi

case $builder in
    docker)
        docker buildx build "${arguments[@]}" --output "type=docker,name=$tag,rewrite-timestamp=true" . ;;
    buildah)
        buildah bud --isolation "${BUILDAH_ISOLATION:-chroot}" --layers --timestamp "$SOURCE_DATE_EPOCH" \
            "${arguments[@]}" -t "$tag" . ;;
    *)
        echo "BUILDER is docker or buildah, not '$builder'" >&2
        exit 2 ;;
esac
