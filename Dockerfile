# The builder's image. `make image` passes the arguments below from docker/base-images.json, the lock file of
# the base images; their defaults are that file's default base. docs/image.md explains building and running.

ARG BASE_IMAGE=nvcr.io/nvidia/tensorrt:26.02-py3

# --- every file that the image takes from a package index, checked against the lock files ---------------------
FROM ${BASE_IMAGE} AS wheels
# tensorrt: the base image's own TensorRT.  tensorrt_rtx: TensorRT for RTX, which builds without a GPU.
ARG BACKEND=tensorrt
# 1 adds ModelOpt and torch, in an environment of their own, for fp8 calibration (several GB).
ARG CALIBRATE=0
ARG SOURCE_DATE_EPOCH=0
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONDONTWRITEBYTECODE=1
WORKDIR /build
COPY requirements requirements
# Where the package index is, and whom to trust, are secrets of the build: nothing of them stays in the image.
RUN --mount=type=secret,id=pip,target=/run/secrets/pip.conf \
    --mount=type=secret,id=ca,target=/run/secrets/ca.pem \
    set -eu; \
    if [ -s /run/secrets/pip.conf ]; then export PIP_CONFIG_FILE=/run/secrets/pip.conf; fi; \
    if [ -s /run/secrets/ca.pem ]; then export PIP_CERT=/run/secrets/ca.pem; fi; \
    case "$BACKEND" in \
        tensorrt) lock=gpu ;; \
        tensorrt_rtx) lock=rtx ;; \
        *) echo "BACKEND is tensorrt or tensorrt_rtx, not '$BACKEND'" >&2; exit 1 ;; \
    esac; \
    cp "requirements/$lock.txt" lock.txt; \
    python3 -m pip install -q --no-deps --require-hashes --target tools -r requirements/build.txt; \
    fetch() { \
        PYTHONPATH=tools python3 -m pip wheel -q --no-deps --require-hashes --no-build-isolation -w "$@"; \
    }; \
    fetch main -r lock.txt; \
    if [ "$CALIBRATE" = 1 ]; then fetch calibrate -r requirements/calibrate.txt -r requirements/torch.txt; fi

# --- the environments, installed from those files alone --------------------------------------------------------
FROM ${BASE_IMAGE} AS environments
ARG BACKEND=tensorrt
ARG CALIBRATE=0
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONHASHSEED=0
COPY engine_builder /opt/sa3-builder/app/engine_builder
COPY verify /opt/sa3-builder/app/verify
COPY entrypoint.py /opt/sa3-builder/app/
# Byte code is compiled here, once, so that an image that cannot write it starts fast.  It is tied to its
# source by hash and not by file time, so that it is the same in every build.
RUN --mount=type=bind,from=wheels,source=/build,target=/build \
    set -eu; \
    environment() { \
        python3 -m venv --without-pip $3 "$1"; \
        python3 -m pip --python "$1/bin/python" install -q --no-index --no-deps --no-compile "$2"/*.whl; \
        rm -f "$1"/bin/[Aa]ctivate*; \
    }; \
    if [ "$BACKEND" = tensorrt ]; then base=--system-site-packages; else base=; fi; \
    environment /opt/sa3-builder/env /build/main "$base"; \
    if [ "$CALIBRATE" = 1 ]; then environment /opt/sa3-builder/app/.venv-calibrate /build/calibrate ""; fi; \
    cp /build/lock.txt /opt/sa3-builder/lock.txt; \
    find /opt/sa3-builder -name __pycache__ -type d -prune -exec rm -rf {} +; \
    python3 -m compileall -q --invalidation-mode unchecked-hash /opt/sa3-builder

# --- the image -------------------------------------------------------------------------------------------------
FROM ${BASE_IMAGE}
ARG BASE_IMAGE
ARG BASE_DIGEST=unresolved
ARG BACKEND=tensorrt
# The version that must be found in the image.
ARG TENSORRT_VERSION=10.15.1.29
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=1970-01-01T00:00:00Z
ARG SOURCE_DATE_EPOCH=0

COPY --from=environments /opt/sa3-builder /opt/sa3-builder
COPY recipes /recipes
# Imports TensorRT, and stops the build unless it is TENSORRT_VERSION.
RUN set -eu; \
    printf 'sa3-builder:x:10001:\n' >> /etc/group; \
    printf 'sa3-builder:x:10001:10001:sa3-builder:/tmp:/usr/sbin/nologin\n' >> /etc/passwd; \
    mkdir -p /models /out /cache; \
    chown 10001:10001 /out /cache; \
    PYTHONDONTWRITEBYTECODE=1 /opt/sa3-builder/env/bin/python /opt/sa3-builder/app/entrypoint.py image-facts \
        --base "$BASE_IMAGE" --base-digest "$BASE_DIGEST" --backend "$BACKEND" \
        --expect-tensorrt "$TENSORRT_VERSION" --revision "$REVISION" --lock /opt/sa3-builder/lock.txt \
        --out /etc/sa3-builder

LABEL org.opencontainers.image.title="sa3-builder" \
      org.opencontainers.image.description="Builds TensorRT engines for Stable Audio 3 and proves what they are" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}"

ENV PYTHONDONTWRITEBYTECODE=1 \
    SA3_BUILDER_CACHE=/cache \
    SA3_BUILDER_REPORT=1 \
    HOME=/tmp
WORKDIR /recipes
USER 10001:10001
ENTRYPOINT ["/opt/sa3-builder/env/bin/python", "/opt/sa3-builder/app/entrypoint.py"]
CMD ["--help"]
