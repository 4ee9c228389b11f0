#!/usr/bin/env bash
# Set up SGLang for a CPU in a folder beside the environment, whose torch and transformers it uses.
#   scripts/setup_sglang.sh     into $VENV/sglang; run it with PYTHONPATH=$VENV/sglang SGLANG_USE_CPU_ENGINE=1
# SGLang's own dependencies are CUDA builds: it is installed without them, with stand-ins for three packages that text
# models on a CPU without AMX import and do not need (scripts/sglang-cpu). A stamp lets a second call return at once.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
folder=$venv/sglang
packages=(sglang==0.5.23 blobfile==3.0.0 gguf==0.19.0 openai-harmony==0.0.4 scipy==1.17.1 soundfile==0.14.0 torchao==0.18.0)

stamp=$(cat "$0" scripts/sglang-cpu/*/*.py | sha256sum | cut -d' ' -f1)
if [ -f "$folder/.foreshock" ] && [ "$(cat "$folder/.foreshock")" = "$stamp" ]; then exit 0; fi

printf '\033[1m%s\033[0m\n' "setup: installing SGLang for a CPU beside the environment" >&2
rm -rf "$folder"
"$venv/bin/uv" pip install -q --python "$venv/bin/python" --no-deps --target "$folder" "${packages[@]}" 2>/dev/null \
    || "$venv/bin/python" -m pip --disable-pip-version-check install -q --no-deps --no-compile --target "$folder" "${packages[@]}"
cp -r scripts/sglang-cpu/* "$folder/"
echo "$stamp" > "$folder/.foreshock"
