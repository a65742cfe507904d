"""Other names that the settings go by, and arguments of estimators that cannot be settings of a job file.

Together with `settings` these are all names of the documented configuration file and of the estimators of the SageMaker
SDK, version 2 (`EstimatorBase`, `Framework`, `PyTorch`, `HuggingFace`); docs/reference/sagemaker-options.md lists them.
"""

# Name in a configuration file or of an estimator -> the setting it is.
ALIASES = {
    "ec2_instance_type": "instance_type",
    "num_machines": "instance_count",
    "iam_role_name": "role",
    "framework_version": "pytorch_version",
}

# Argument of an estimator -> what a job file has instead. `Client.submit_estimator` puts it there.
ELSEWHERE = {
    "entry_point": "`script`",
    "source_dir": "`workdir: {path: ...}`",
    "hyperparameters": "`args`",
}

_WORKDIR = "the job's whole `workdir` travels"
_CONTRACT = "orc starts the container's program itself"

# Argument of an estimator -> why nothing here can take its place.
REFUSED = {
    "sagemaker_session": "sessions are made from `profile`, `region` and `endpoint_url` of the cluster",
    "git_config": "check the repository out and submit from there; its state is recorded with the job",
    "dependencies": f"{_WORKDIR}; put them into it",
    "code_location": "`bucket` and `prefix` of the cluster say where code is kept",
    "model_uri": "name it as a channel in `inputs`",
    "model_channel_name": "name it as a channel in `inputs`",
    "rules": "SageMaker Debugger is not supported; orc.runtime watches for stalls and spikes of the loss",
    "debugger_hook_config": "SageMaker Debugger is not supported; `false` is accepted",
    "instance_groups": "all instances of a job have one type; use `instance_type` and `instance_count`",
    "container_entry_point": _CONTRACT,
    "container_arguments": f"{_CONTRACT}; arguments go into `args`",
    "container_log_level": "the level of the program's log is `runtime.log_level`",
    "compiler_config": "the SageMaker Training Compiler is discontinued; use `runtime.dynamo_backend`",
    "tensorflow_version": "orc launches PyTorch",
    "training_recipe": f"{_WORKDIR}; write the script that trains, and name it in `script`",
    "recipe_overrides": "there is no training_recipe; arguments go into `args`",
    "algorithm_arn": "algorithms of the marketplace bring a program of their own; orc runs yours",
    "wait": "`orc wait` waits",
    "logs": "`orc logs` shows logs",
    "job_name": "the name follows from the attempt; `base_job_name` is what it begins with",
    "aws_access_key_id": "credentials do not belong into files; use a profile or the environment",
    "aws_secret_access_key": "credentials do not belong into files; use a profile or the environment",
    "aws_session_token": "credentials do not belong into files; use a profile or the environment",
}
