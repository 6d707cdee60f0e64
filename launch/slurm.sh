#!/usr/bin/env bash
# FSDP2 or ZeRO-3 on two machines with eight GPUs each; use it when one machine's GPUs are too few or too slow.
#     sbatch launch/slurm.sh configs/X.yaml [--rates.heads 3e-4 …]
#     LAUNCH=launch/zero3.yaml sbatch launch/slurm.sh configs/X.yaml …      # where your cluster runs DeepSpeed
# Submit it from the repository root, with output_dir and HF_DATASETS_CACHE on a disk that all machines share.
#SBATCH --job-name=headway
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300
# Five minutes before its time ends (or when it is pre-empted) the job is told by SIGTERM; every process then saves a
# checkpoint and leaves, and the job is put back into the queue. It goes on from the last whole checkpoint, or starts
# again if there is none yet.
set -uo pipefail
config=${1:?"usage: sbatch launch/slurm.sh configs/X.yaml [flags]"}
shift
[ -d .venv ] && . .venv/bin/activate

export LAUNCH=${LAUNCH:-launch/fsdp2_multi_node.yaml}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((29500 + SLURM_JOB_ID % 1000))
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240   # what a save may take; the launcher kills its processes after that
processes=$((SLURM_NNODES * ${SLURM_GPUS_ON_NODE:-8}))
resume=(); [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && resume=(--resume true)

told=0
forward() { told=1; kill -TERM "$step" 2>/dev/null; }
trap forward TERM USR1
srun --kill-on-bad-exit=1 bash -c 'exec accelerate launch --config_file "$LAUNCH" \
    --num_machines "$SLURM_NNODES" --num_processes "'$processes'" --machine_rank "$SLURM_NODEID" \
    --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" --deepspeed_multinode_launcher standard \
    train.py "$@"' _ --config "$config" "${resume[@]}" "$@" &
step=$!
wait "$step"; code=$?
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done   # a trap ends the first wait

# A run that was stopped says so by a file in its folder; the launcher's exit code does not tell that from a failure.
output=${OUTPUT_DIR:-$(sed -n 's/^output_dir: *//p' "$config")}   # set OUTPUT_DIR where --output_dir is given
if [ "$told" -eq 1 ] && [ -e "$output/requeue" ]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
