# The server, with the voice in the box; other checkpoints by --checkpoint behind the image's name.
#   docker build -t mktts . && docker run -p 127.0.0.1:8000:8000 -e MKTTS_API_KEY=secret mktts
# With NVIDIA's container toolkit, on a GPU: --build-arg CPU=0 for build, --gpus all for run.
FROM debian:bookworm-slim
ARG CPU=1

# The C compiler and Python's headers are for Triton, which compiles the launchers of its kernels.
RUN apt-get update && apt-get install -y --no-install-recommends make python3-venv \
  $(test "$CPU" = 1 || echo gcc libc6-dev python3-dev) && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --home-dir /srv/mktts mktts
WORKDIR /srv/mktts
USER mktts
# What the installation reads, and no more: another line of Python does not install PyTorch again.
COPY --chown=mktts Makefile pyproject.toml requirements.txt README.md LICENSE NOTICE ./
COPY --chown=mktts mktts/__init__.py mktts/
# Compiled kernels and downloaded checkpoints: a volume mounted there belongs to the same user.
RUN mkdir .cache && PIP_NO_CACHE_DIR=1 make setup CPU=$CPU EXTRAS=server$(test "$CPU" = 1 || echo ,gpu)
COPY --chown=mktts csrc csrc
COPY --chown=mktts mktts mktts
ENV TRITON_HOME=/srv/mktts/.cache

EXPOSE 8000
# The first start on a GPU compiles kernels and measures how many listeners it serves.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m CMD [".venv/bin/python", "-c", \
  "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT [".venv/bin/python", "-m", "mktts", "serve", "--host", "0.0.0.0"]
