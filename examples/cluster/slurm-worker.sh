#!/bin/bash
# Eight workers with one GPU each, until there was no job for ten minutes.
#   FORESHOCK_URL=http://foreshock:8765 FORESHOCK_WEIGHTS_ROOTS=checkpoints=/mnt/runs sbatch slurm-worker.sh
# The API key is read from the file FORESHOCK_KEY_FILE (default: ~/.foreshock-worker-key), which only you can read.
#SBATCH --job-name=foreshock-worker
#SBATCH --array=0-7
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=24:00:00
# A worker that is told to stop finishes its job or returns it within FORESHOCK_SHUTDOWN_GRACE_SECONDS (20).
#SBATCH --signal=TERM@60
#SBATCH --requeue
set -euo pipefail

: "${FORESHOCK_URL:?set it to the address of the service}"
: "${FORESHOCK_WEIGHTS_ROOTS:?set it to the folders of announced checkpoints, such as checkpoints=/mnt/runs}"

FORESHOCK_API_KEY=$(<"${FORESHOCK_KEY_FILE:-$HOME/.foreshock-worker-key}")
# The restart count keeps the names of a requeued task apart.
FORESHOCK_WORKER_NAME="slurm-${SLURM_JOB_ID}-${SLURM_ARRAY_TASK_ID:-0}-${SLURM_RESTART_COUNT:-0}"
export FORESHOCK_API_KEY FORESHOCK_WORKER_NAME

exec srun foreshock worker --until-idle 600
