#!/bin/bash
# Runs one script of a DeepSpeed-Chat clone as its authors do: start.sh SCRIPT JOB HOSTFILE OUTPUT [ARGUMENT...]
# PROJECT_PATH, SSH_PORT and MASTER_PORT, which the scripts read too, are set already.
here=$PWD

# Where the scripts look for `deepspeed`: on the path, or in the home of who wrote them.
LABCTL_DEEPSPEED=$(command -v deepspeed) || { echo "start.sh: there is no deepspeed on $PATH"; exit 127; }
export LABCTL_DEEPSPEED PATH=$here/bin:$PATH USER=${HOME##*/}
mkdir -p ~/.local/bin && ln -sfn "$here/bin/deepspeed" ~/.local/bin/deepspeed || exit

# Models lie where the clone's own compose file keeps them, as one script names a snapshot there by its path. Where
# there is nothing yet, that is another name for the hub's cache.
mkdir -p "$HF_HOME/hub" || exit
[[ -e $HF_HOME/transformers ]] || ln -s hub "$HF_HOME/transformers" || exit
export TRANSFORMERS_CACHE=${TRANSFORMERS_CACHE:-$HF_HOME/transformers}
export HF_HUB_CACHE=${HF_HUB_CACHE:-$TRANSFORMERS_CACHE}

# DeepSpeed hands these on to every rank; of its own environment it forwards next to nothing. A person's own file comes
# first, so that the run's words win, and without what DeepSpeed cannot read: lines without `=`, and `export`.
own=${DS_ENV_FILE:-}
[[ -z $own || -r $own ]] || { echo "start.sh: DS_ENV_FILE: cannot read $own in the container"; exit 1; }
export DS_ENV_FILE=$LABCTL_RUN_DIR/.deepspeed_env
{
    [[ -z $own ]] || sed -nE 's/^[[:space:]]*(export[[:space:]]+)?([A-Za-z_][A-Za-z0-9_]*=.*)/\2/p' "$own"
    echo
    for name in LABCTL_RUN_ID LABCTL_RUN_DIR TRANSFORMERS_CACHE HF_HUB_CACHE; do
        echo "$name=${!name}"
    done
} | sed '/^$/d' > "$DS_ENV_FILE"

cd "$PROJECT_PATH/DeepSpeedExamples/applications/DeepSpeed-Chat/training" || exit

# Microsoft's own begin in the folder of their step, take OUTPUT among their arguments and print to a file in it.
if [[ $1 == */* ]]; then
    place=$(sed -nE 's/^OUTPUT=\$([0-9])$/\1/p' "$1")
    output=$4/output
    mkdir -p "$output" && : > "$output/training.log" || exit
    arguments=("${@:5}")
    while ((${#arguments[@]} < place - 1)); do arguments+=(""); done
    arguments=("${arguments[@]:0:place-1}" "$output" "${arguments[@]:place-1}")
    export PYTHONPATH=${PWD%/*}${PYTHONPATH:+:$PYTHONPATH}
    cd "${1%%/*}" || exit
    bash "${1#*/}" "${arguments[@]}" &
    tail --pid=$! --sleep-interval=0.2 --lines=+1 --follow "$output/training.log"
    wait $!
    exit
fi
# The scripts end in `deepspeed ... | tee LOG`; without this, tee's exit code would be theirs.
exec bash -o pipefail "./$1" "${@:2}"
