# One file, two images (docs/docker.md says how to run them, and why with which limits):
#
#   docker build -t megatrain .
#   docker build -t megatrain:cpu --build-arg TORCH="torch --index-url https://download.pytorch.org/whl/cpu" .
#
# BASE needs no CUDA: PyTorch's wheels bring it, and the driver comes from the host.
ARG BASE=debian:bookworm-slim
FROM ${BASE}

# A compiler and Python's headers: Triton builds a launcher for each kernel, and compiled layers on a CPU are C++.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# Folders for volumes. Any user may write there, so that `docker run --user` may be anybody.
RUN useradd --uid 1000 --home-dir /cache --no-create-home megatrain \
    && install --directory --mode=1777 /cache /work \
    && install --directory --owner=megatrain --group=megatrain /opt/megatrain
USER megatrain

# torch first: it is the largest layer, and changes least. Of transformers the release that is tested.
ARG TORCH="torch>=2.11"
ARG TRANSFORMERS="transformers==5.24.0"
RUN python3 -m venv /opt/megatrain/venv \
    && /opt/megatrain/venv/bin/pip install --no-cache-dir ${TORCH}

COPY --chown=megatrain pyproject.toml README.md LICENSE /opt/megatrain/source/
COPY --chown=megatrain megatrain /opt/megatrain/source/megatrain
# Of the extras in pyproject.toml, such as EXTRAS="[wandb,eval]"
ARG EXTRAS=""
RUN /opt/megatrain/venv/bin/pip install --no-cache-dir "${TRANSFORMERS}" "/opt/megatrain/source${EXTRAS}"

# HOME: downloads, measured rates, compiled kernels and tokens lie below it, in one volume.
# USER: PyTorch's compiler asks for a name, which a user id of --user does not have.
# NVIDIA_DRIVER_CAPABILITIES: `utility` is the part of the driver that tells how much memory a GPU has.
ENV PATH=/opt/megatrain/venv/bin:$PATH \
    HOME=/cache \
    USER=megatrain \
    XDG_CACHE_HOME=/cache \
    TORCHINDUCTOR_CACHE_DIR=/cache/torchinductor \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME /cache
WORKDIR /work
ENTRYPOINT ["megatrain"]
CMD ["--help"]
