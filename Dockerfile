# The demo on a CPU: docker build -t minilm-cache . && docker run --rm -v minilm-cache:/home/user/.cache minilm-cache
FROM python:3.11-slim
RUN useradd --create-home user
WORKDIR /home/user/minilm-cache
COPY . .
# The CPU build of torch: the usual one brings gigabytes of CUDA libraries.
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt '.[demo]'
RUN mkdir /home/user/.cache && chown -R user: /home/user
USER user
ENTRYPOINT ["minilm-cache"]
CMD ["demo"]
