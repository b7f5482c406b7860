# rlflow for NVIDIA GPUs.
#
#     docker build -f k8s/images/cuda.Dockerfile -t rlflow:cuda .
#
# The devel base has nvcc and a C compiler: Triton, FlashInfer and DeepSpeed compile kernels when they are first used.
# CUDA 13 needs driver R580 or later on the nodes. For what KubeRay needs of an image see cpu.Dockerfile.

FROM python:3.11.14-slim-bookworm AS uv
RUN pip install --no-cache-dir uv==0.13.8

FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS build
COPY --from=uv /usr/local/bin/uv /usr/local/bin/uv
ENV UV_PYTHON_INSTALL_DIR=/opt/python \
    UV_LINK_MODE=copy
RUN uv venv --python 3.11.14 --python-preference only-managed /opt/venv
WORKDIR /src
COPY . .
RUN uv pip install --python /opt/venv/bin/python --no-cache --compile-bytecode ".[gpu,deepspeed,lora,math,datasets]" \
    && /opt/venv/bin/rlflow recipes >/dev/null \
    && /opt/venv/bin/python -c "import torch; assert torch.version.cuda, f'torch {torch.__version__} is a CPU build'"

FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
# The base has a user 1000 of its own.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1 wget \
    && rm -rf /var/lib/apt/lists/* \
    && userdel --remove ubuntu \
    && useradd --uid 1000 --user-group --create-home rlflow
COPY --from=build /opt/python /opt/python
COPY --from=build /opt/venv /opt/venv
RUN echo "PATH=/opt/venv/bin:\$PATH" >/etc/profile.d/rlflow.sh
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /home/rlflow
CMD ["rlflow", "--help"]
