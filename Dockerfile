# An image with detspec, from this repository alone. Build it in its root, and push it where the nodes find it:
#
#     docker build --build-arg EXTRAS=gpu,data --tag registry.example/detspec:0.2.0 .
#     docker push registry.example/detspec:0.2.0
#
# EXTRAS are those of pyproject.toml: gpu brings CUDA 13 (the node has the driver), tpu libtpu; CPUs need none of both. data reads
# tables.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY detspec detspec
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG EXTRAS=gpu,data
# On CPUs, kernels are compiled for the processor at hand when they are first needed.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /wheels /wheels
RUN python -m pip install --no-cache-dir "$(ls /wheels/*.whl)[${EXTRAS}]"
ENTRYPOINT ["detspec"]
