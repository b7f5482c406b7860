# rlflow for machines without GPUs, with the exact versions that the tests ran with.
#
#     docker build -f k8s/images/cpu.Dockerfile -t rlflow:cpu .
#
# KubeRay needs of an image: bash, `ray` and `python3` on the PATH, of a login shell too (older releases start one); wget
# for the probes of older releases. The preStop hook of workers needs flock, which Debian has.

FROM python:3.11.14-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY scripts/setup.py scripts/
COPY requirements/cpu.lock requirements/excluded.txt requirements/
COPY pyproject.toml ./
# A layer of its own: it takes minutes, and changes only with the lock file.
RUN python scripts/setup.py --venv /opt/venv --packages-only
COPY . .
RUN /opt/venv/bin/uv pip install --python /opt/venv/bin/python --no-deps --no-build-isolation --compile-bytecode . \
    && /opt/venv/bin/rlflow recipes >/dev/null

FROM python:3.11.14-slim-bookworm
# libnuma1: vLLM on CPUs.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1 wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --user-group --create-home rlflow
COPY --from=build /opt/venv /opt/venv
RUN echo "PATH=/opt/venv/bin:\$PATH" >/etc/profile.d/rlflow.sh
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /home/rlflow
CMD ["rlflow", "--help"]
