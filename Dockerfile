# canaryd as a sidecar. Build: docker build -t canaryd .
#
# The base image is an argument; it must be Debian or Ubuntu with Python 3.11 or later among its packages. The NVIDIA
# driver's libraries come from the container runtime, never from the image.
ARG BASE_IMAGE=debian:bookworm-slim

# --- build: a virtual environment with the daemon in it ---------------------------------------------------------------
FROM ${BASE_IMAGE} AS build
# A mirror, or the index of torch's CPU build for an image that only watches host memory; pip reads both by itself.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# EXTRAS=daemon leaves out what only GPUs need.
ARG EXTRAS=daemon,cuda
COPY requirements-dev.txt constraints-gpu.txt ./
RUN python3 -m venv /opt/canaryd \
 && /opt/canaryd/bin/pip install --no-cache-dir -c requirements-dev.txt setuptools torch triton
COPY pyproject.toml README.md LICENSE ./
COPY canaryd canaryd
COPY kernels kernels
RUN /opt/canaryd/bin/pip install --no-cache-dir --no-build-isolation -c requirements-dev.txt ".[${EXTRAS}]"

# --- runtime ----------------------------------------------------------------------------------------------------------
FROM ${BASE_IMAGE} AS runtime
# gcc, libc6-dev and python3-dev stay in the image: when Triton first launches a kernel on a machine it compiles a C stub
# against Python.h and the machine's libcuda. Without a compiler the first GPU launch fails, and no test on a CPU sees it.
# A cache baked at build time would not do: Triton 3.6 compiles a stub for every signature, and the key of the stub's
# entry depends on what else is on PATH.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-dev \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 canaryd \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin canaryd \
 && install -d -o 10001 -g 10001 -m 0700 /run/canaryd /var/lib/canaryd /var/cache/canaryd
COPY --from=build /opt/canaryd /opt/canaryd
COPY configs/canaryd.yaml /etc/canaryd/canaryd.yaml
# With a read-only root file system, mount something writable at /run/canaryd (sockets), /var/lib/canaryd (findings),
# /var/cache/canaryd (compiled kernels) and /tmp (the compiler's scratch).
ENV PATH=/opt/canaryd/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TRITON_CACHE_DIR=/var/cache/canaryd/triton \
    CANARYD_HTTP__HOST=0.0.0.0 \
    CANARYD_HTTP__PORT=9847 \
    CANARYD_SOCKET_DIR=/run/canaryd \
    CANARYD_STATE_DIR=/var/lib/canaryd \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
EXPOSE 9847
# Healthy means that the supervisor answers; findings never make the container unhealthy.
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s --retries=4 \
  CMD ["python3", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:%s/healthz' % os.environ['CANARYD_HTTP__PORT'], timeout=4)"]
ENTRYPOINT ["canaryd"]
CMD ["serve", "--config", "/etc/canaryd/canaryd.yaml"]
