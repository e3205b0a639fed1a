#!/usr/bin/env bash
# Builds the real Dockerfile on a stand-in for the NGC image and builds an engine in it: as an ordinary user,
# without network, with nothing but the mounted folders writable.  `make image-test BUILDER=buildah` calls this.
#   BUILDER   buildah (needs root, no container engine) or docker    [docker]
#   REPEAT    1 builds the image twice from nothing and compares     [1]
# The stand-in is Debian bookworm with its own python3, made by debootstrap, and the engine is built by
# TensorRT for RTX, which needs no GPU: it takes the place of the base image's TensorRT.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

builder=${BUILDER:-docker}
stand_in=localhost/sa3-builder-stand-in:bookworm-1
tag=localhost/sa3-builder-test
work=$(mktemp -d)
container=
say() { printf '\n== %s\n' "$*"; }
fail() { echo "image test FAILED: $*" >&2; exit 1; }
cleanup() {
    if [ -n "$container" ]; then buildah rm "$container" > /dev/null || true; fi
    rm -rf "$work"
}
trap cleanup EXIT
command -v "$builder" > /dev/null || fail "$builder is not installed"

# --- the stand-in for the base image ---------------------------------------------------------------------------
has_image() {
    case $builder in
        buildah) buildah inspect --type image "$1" > /dev/null 2>&1 ;;
        docker) docker image inspect "$1" > /dev/null 2>&1 ;;
    esac
}
if ! has_image "$stand_in"; then
    say "making the stand-in for the base image"
    command -v debootstrap > /dev/null || fail "debootstrap is not installed"
    debootstrap --variant=minbase --include=python3,python3-pip,ca-certificates bookworm "$work/root" \
        > "$work/debootstrap.log" || { tail -n 20 "$work/debootstrap.log" >&2; fail "debootstrap"; }
    rm -rf "$work"/root/var/cache/apt/* "$work"/root/var/lib/apt/lists/*
    case $builder in
        buildah)
            container=$(buildah from scratch)
            buildah add -q "$container" "$work/root" / > /dev/null
            buildah commit -q "$container" "$stand_in" > /dev/null
            buildah rm "$container" > /dev/null
            container= ;;
        docker)
            tar -C "$work/root" -c . | docker import - "$stand_in" > /dev/null ;;
    esac
    rm -rf "$work/root"
fi

# --- the image, from nothing, twice ----------------------------------------------------------------------------
tensorrt=$(sed -n 's/^tensorrt-rtx-cu13==\([^ ]*\).*/\1/p' requirements/rtx.txt)
build() {
    BUILDER=$builder TAG=$1 NO_CACHE=$2 BACKEND=tensorrt_rtx BASE_IMAGE=$stand_in TENSORRT_VERSION=$3 \
        docker/image.sh > "$work/build.log" 2>&1
}
digest() {
    case $builder in
        buildah) buildah inspect --type image --format 'sha256:{{.FromImageID}} {{.FromImageDigest}}' "$1" ;;
        docker) docker image inspect --format '{{.Id}}' "$1" ;;
    esac
}
say "building the image"
build "$tag" "${REPEAT:-1}" "$tensorrt" || { tail -n 40 "$work/build.log" >&2; fail "the image was not built"; }
grep WARNING "$work/build.log" || fail "the unresolved digest was not said aloud"
first=$(digest "$tag")
echo "image: $first"
if [ "${REPEAT:-1}" = 1 ]; then
    build "$tag-again" 1 "$tensorrt" || { tail -n 40 "$work/build.log" >&2; fail "the second build"; }
    again=$(digest "$tag-again")
    echo "again: $again"
    [ "$first" = "$again" ] || fail "two builds of the same source gave two images"
    echo "two builds from nothing gave the same image"
fi

say "refusing a base with another TensorRT"
if build "$tag-wrong" 0 "9.9.9"; then fail "an image with the wrong TensorRT was built"; fi
grep "and 9.9.9 was to be in it" "$work/build.log" || fail "the reason is missing"

# --- an engine, built in it ------------------------------------------------------------------------------------
mkdir "$work/out" "$work/cache"
chown 10001:10001 "$work/out" "$work/cache" 2> /dev/null || chmod 777 "$work/out" "$work/cache"
environment=(SA3_BUILDER_CACHE=/cache HOME=/tmp PYTHONDONTWRITEBYTECODE=1 "SA3_BUILDER_IMAGE=$tag@${first##* }")
entry=(/opt/sa3-builder/env/bin/python /opt/sa3-builder/app/entrypoint.py)
if [ "$builder" = buildah ]; then
    container=$(buildah from "$tag")
    root=$(buildah mount "$container")
fi
inside() { # runs a program as the image's user, without network
    case $builder in
        buildah)
            # chroot isolation shares its caller's network, so the caller is given one without interfaces.
            unshare --net buildah run --isolation "${BUILDAH_ISOLATION:-chroot}" -e "${environment[3]}" \
                -v "$work/out:/out" -v "$work/cache:/cache" "$container" -- "$@" ;;
        docker)
            docker run --rm --network none --read-only --tmpfs /tmp -e "${environment[3]}" \
                -v "$work/out:/out" -v "$work/cache:/cache" --entrypoint "$1" "$tag" "${@:2}" ;;
    esac
}
say "building recipes/smoke.yaml in it"
[ "$(inside /usr/bin/id -u)" = 10001 ] || fail "it does not run as user 10001"
interfaces=$(inside /bin/sh -c 'tail -n +3 /proc/net/dev | cut -d: -f1 | grep -cv "^ *\(lo\|ifb[0-9]*\)$" || true')
[ "$interfaces" = 0 ] || fail "it has a network"
touch "$work/before"
sleep 1
inside "${entry[@]}" smoke.yaml || fail "the engine was not built"
engine=$work/out/sm_89/smoke/dit_fp16.trt
grep -q '"verdict": "passed"' "${engine%.trt}.verify.json" || fail "the engine is not verified"
for word in '"base_digest": "unresolved"' "\"tensorrt\": \"$tensorrt\"" '"revision"' '"sbom_sha256"' "${first##* }"; do
    grep -q "$word" "${engine%.trt}.manifest.json" || fail "the manifest lacks $word"
done
if [ "$builder" = buildah ]; then
    changed=$(find "$root" -xdev -newer "$work/before" ! -type d ! -path "$root/tmp/*" ! -path "$root/run/*" \
        ! -path "$root/proc/*" ! -path "$root/dev/*" ! -path "$root/sys/*" || true)
    [ -z "$changed" ] || fail "it wrote outside its folders: $changed"
fi

say "building for another architecture with a read-only root"
case $builder in
    buildah)
        unshare --net --mount bash -euc '
            root=$1 work=$2; shift 2
            mount --bind "$root" "$root"
            mount --bind "$work/out" "$root/out"
            mount --bind "$work/cache" "$root/cache"
            mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
            mount -t proc proc "$root/proc"
            mount -o remount,bind,ro "$root"
            if touch "$root/written" 2> /dev/null; then echo "the root is writable" >&2; exit 1; fi
            cd "$root/recipes"
            exec setpriv --no-new-privs chroot --userspec=10001:10001 "$root" /usr/bin/env -i -C /recipes "$@"
            ' bash "$root" "$work" "${environment[@]}" "${entry[@]}" smoke.yaml --sm 120 ;;
    docker)
        inside "${entry[@]}" smoke.yaml --sm 120 ;;
esac || fail "it needs to write to its root"
[ -f "$work/out/sm_120/smoke/dit_fp16.trt" ] || fail "there is no engine for sm_120"

say "provenance and bill of materials"
inside "${entry[@]}" provenance /out/sm_89/smoke/dit_fp16.trt || fail "no provenance"
inside "${entry[@]}" verify-provenance /out/sm_89/smoke/dit_fp16.provenance.json \
    --engine /out/sm_89/smoke/dit_fp16.trt --material /recipes/smoke.yaml || fail "the provenance does not verify"
inside /bin/sh -c 'cat /etc/sa3-builder/sbom.cdx.json' > "$work/sbom.cdx.json"
grep -q "$(sha256sum "$work/sbom.cdx.json" | cut -d' ' -f1)" "${engine%.trt}.manifest.json" \
    || fail "the manifest names another bill of materials"
if [ -n "${SBOM_OUT:-}" ]; then cp "$work/sbom.cdx.json" "$SBOM_OUT"; fi

say "what the image is made of, in MB"
inside /bin/sh -c 'cd /opt/sa3-builder; du -sm /usr env app | sort -rn; echo "the largest packages:";
    du -sm env/lib/python3*/site-packages/* | sort -rn | head -n 10'
case $builder in
    buildah) buildah images --format 'image {{.Name}}: {{.Size}}' "$tag"
             buildah images --format 'of which {{.Name}}: {{.Size}}' "$stand_in" ;;
    docker) docker images "$tag" ;;
esac

if [ "$builder" = buildah ]; then
    for name in "$tag-again" "$tag-wrong"; do
        if has_image "$name"; then buildah rmi "$name" > /dev/null 2>&1 || true; fi
    done
fi
say "image test passed"
