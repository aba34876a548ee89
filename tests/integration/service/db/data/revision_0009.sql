BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0009');
CREATE TABLE alert_cursor (
	number INTEGER NOT NULL, 
	event_number INTEGER NOT NULL, 
	CONSTRAINT pk_alert_cursor PRIMARY KEY (number)
);
INSERT INTO "alert_cursor" VALUES(1,3);
CREATE TABLE attempts (
	run_number INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	first_step INTEGER NOT NULL, 
	CONSTRAINT pk_attempts PRIMARY KEY (run_number, attempt), 
	CONSTRAINT fk_attempts_run_number FOREIGN KEY(run_number) REFERENCES runs (number) ON DELETE CASCADE
);
INSERT INTO "attempts" VALUES(1,1,1);
INSERT INTO "attempts" VALUES(1,2,3);
CREATE TABLE evaluations (
	number INTEGER NOT NULL, 
	run_number INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	benchmark VARCHAR(200) NOT NULL, 
	record JSON NOT NULL, 
	CONSTRAINT pk_evaluations PRIMARY KEY (number), 
	CONSTRAINT fk_evaluations_run_number FOREIGN KEY(run_number) REFERENCES runs (number) ON DELETE CASCADE
);
INSERT INTO "evaluations" VALUES(1,1,1,2,'easy','{"attempt": 1, "step": 2, "time": 2.0, "benchmark": "easy", "scores": {"pass@1": "NaN"}, "per_problem": [0.0, 1.0]}');
CREATE TABLE events (
	number INTEGER NOT NULL, 
	run_number INTEGER, 
	time DOUBLE NOT NULL, 
	actor VARCHAR(120) NOT NULL, 
	kind VARCHAR(60) NOT NULL, 
	message TEXT NOT NULL, 
	fields JSON NOT NULL, 
	CONSTRAINT pk_events PRIMARY KEY (number), 
	CONSTRAINT fk_events_run_number FOREIGN KEY(run_number) REFERENCES runs (number) ON DELETE CASCADE
);
INSERT INTO "events" VALUES(1,NULL,1.79549354130813932414e+09,'first start','token_created','token ''ada'' (admin) was created','{"token": "t01m85w2dcgsbs3jr2epy"}');
INSERT INTO "events" VALUES(2,NULL,1.7954935413091087341e+09,'token:ada','token_created','token ''old viewer'' (viewer) was created','{"token": "t01m85w2ddwwv64fntyvf"}');
INSERT INTO "events" VALUES(3,NULL,1.79549354201758599273e+09,'token:ada','group_created','group ''pairs''','{"group": "g01m85w2e3x2992g6gevm"}');
INSERT INTO "events" VALUES(4,1,1.79549354208046984667e+09,'token:ada','submitted','submitted','{"parent": null}');
INSERT INTO "events" VALUES(5,2,1.79549354215299487112e+09,'token:ada','submitted','submitted','{"parent": null}');
INSERT INTO "events" VALUES(6,1,1.79549354221562933921e+09,'trainer','state','launch 1 sent its first heartbeat','{"old": "starting", "new": "running", "reason": null}');
INSERT INTO "events" VALUES(7,1,3.25,'trainer','checkpoint','step 2','{}');
INSERT INTO "events" VALUES(8,1,1.7954935422457187176e+09,'trainer','state','budget.steps reached','{"old": "running", "new": "succeeded", "reason": "steps_done"}');
CREATE TABLE groups (
	number INTEGER NOT NULL, 
	id VARCHAR(32) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	kind VARCHAR(20) NOT NULL, 
	spec JSON NOT NULL, 
	created_at DOUBLE NOT NULL, 
	created_by VARCHAR(100) NOT NULL, 
	CONSTRAINT pk_groups PRIMARY KEY (number), 
	CONSTRAINT uq_groups_id UNIQUE (id)
);
INSERT INTO "groups" VALUES(1,'g01m85w2e3x2992g6gevm','pairs','group','{"name": "pairs"}',1.79549354201309895517e+09,'ada');
CREATE TABLE idempotency_keys (
	token_id VARCHAR(32) NOT NULL, 
	"key" VARCHAR(200) NOT NULL, 
	body_sha256 VARCHAR(64) NOT NULL, 
	resource_id VARCHAR(32) NOT NULL, 
	created_at DOUBLE NOT NULL, 
	CONSTRAINT pk_idempotency_keys PRIMARY KEY (token_id, "key")
);
INSERT INTO "idempotency_keys" VALUES('t01m85w2dcgsbs3jr2epy','key-1','aae806c48d800da6709b02102d59aced6aad4592d3e597e27ac611e05cc2f1b6','r01m85w2e4t8wtbz4w2nz',1.79549354204237413402e+09);
CREATE TABLE metric_blocks (
	run_number INTEGER NOT NULL, 
	name_number INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	block INTEGER NOT NULL, 
	data BLOB NOT NULL, 
	CONSTRAINT pk_metric_blocks PRIMARY KEY (run_number, name_number, attempt, block), 
	CONSTRAINT fk_metric_blocks_name_number FOREIGN KEY(name_number) REFERENCES metric_names (number), 
	CONSTRAINT fk_metric_blocks_run_number FOREIGN KEY(run_number) REFERENCES runs (number) ON DELETE CASCADE
)
 WITHOUT ROWID

;
INSERT INTO "metric_blocks" VALUES(1,2,1,0,X'01000000000000000000D03F02000000000000000000F87F03000000000000000000E03F');
INSERT INTO "metric_blocks" VALUES(1,2,2,0,X'03000000000000000000E83F');
INSERT INTO "metric_blocks" VALUES(1,3,1,0,X'010000000000000000005940020000000000000000006940030000000000000000C07240');
INSERT INTO "metric_blocks" VALUES(1,4,1,0,X'010000000000000000000040020000000000000000001040030000000000000000001840');
INSERT INTO "metric_blocks" VALUES(1,5,1,0,X'010000000000000000000840020000000000000000001840030000000000000000002240');
CREATE TABLE metric_last (
	run_number INTEGER NOT NULL, 
	name_number INTEGER NOT NULL, 
	last DOUBLE, 
	last_step INTEGER NOT NULL, 
	lowest DOUBLE, 
	highest DOUBLE, 
	CONSTRAINT pk_metric_last PRIMARY KEY (run_number, name_number), 
	CONSTRAINT fk_metric_last_name_number FOREIGN KEY(name_number) REFERENCES metric_names (number), 
	CONSTRAINT fk_metric_last_run_number FOREIGN KEY(run_number) REFERENCES runs (number) ON DELETE CASCADE
);
INSERT INTO "metric_last" VALUES(1,2,0.75,3,0.25,0.75);
INSERT INTO "metric_last" VALUES(1,3,200.0,2,100.0,200.0);
INSERT INTO "metric_last" VALUES(1,4,4.0,2,2.0,4.0);
INSERT INTO "metric_last" VALUES(1,5,6.0,2,3.0,6.0);
CREATE TABLE metric_names (
	number INTEGER NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	CONSTRAINT pk_metric_names PRIMARY KEY (number), 
	CONSTRAINT uq_metric_names_name UNIQUE (name)
);
INSERT INTO "metric_names" VALUES(1,'eval/average/pass@1');
INSERT INTO "metric_names" VALUES(2,'reward/mean');
INSERT INTO "metric_names" VALUES(3,'rollout/tokens_total');
INSERT INTO "metric_names" VALUES(4,'time/training_s');
INSERT INTO "metric_names" VALUES(5,'update/backward_passes_total');
CREATE TABLE run_documents (
	run_number INTEGER NOT NULL, 
	config JSON NOT NULL, 
	identity JSON, 
	CONSTRAINT pk_run_documents PRIMARY KEY (run_number), 
	CONSTRAINT fk_run_documents_run_number FOREIGN KEY(run_number) REFERENCES runs (number) ON DELETE CASCADE
);
INSERT INTO "run_documents" VALUES(1,'{"name": "Gr\u00f6\u00dfe \u03c0", "seed": 0, "model": {"path": "starter", "revision": null, "trust_remote_code": false, "max_length": 256, "attention": "auto", "gradient_checkpointing": "auto"}, "data": {"source": "word_problems", "split": "train", "subset": null, "prompt_field": "problem", "answer_field": "answer", "template": "auto", "levels": null, "num_problems": 4096, "difficulty": ["easy", "medium", "hard"], "contamination": "drop", "max_prompt_tokens": 1024, "shuffle": true}, "rollout": {"prompts_per_step": 64, "samples_per_prompt": 8, "max_new_tokens": 48, "ignore_eos": false, "temperature": 1.0, "top_p": 1.0, "deterministic": false, "logprob_gap_mean_limit": null, "logprob_gap_max_limit": null, "dtype": "auto", "gpu_memory_utilization": 0.4, "cpu_kv_cache_gib": 1, "max_num_seqs": 512, "enforce_eager": true, "async_depth": 0, "update_in_flight": false}, "environment": {"name": "single_turn", "url": null, "action_field": "message", "observation_field": null, "max_turns": 4, "max_observation_tokens": 64, "deadline_s": 5.0, "workers": 4, "memory_mb": 1024}, "verifier": {"workers": 2, "deadline_s": 5.0, "memory_mb": 2048, "rewards": [{"name": "correctness", "weight": 1.0}], "max_failed_fraction": 0.2}, "learner": {"rule": {"name": "gxpo", "k": 5, "alpha": 0.5, "delta": 1e-08, "activity": "delta", "activity_rms": 0.001, "probes": 2, "predictor": "gradient", "probe_state": "keep", "ratio_clip": [-2.0, 3.0], "scale_clip": "auto", "gate": {"threshold": 3.0, "window": 30, "warmup": 5, "epsilon": 1e-08, "mode": "permanent", "two_sided": false, "rearm_after": 20, "rearm_threshold": 0.0}}, "loss": {"surrogate": "ppo", "clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.0, "aggregation": "token_mean", "advantage_std": true, "advantage_epsilon": 1e-06, "zero_variance": "keep", "resample_limit": 3, "mask_truncated": false, "proximal": "auto", "correction": "auto", "importance_low": 0.5, "importance_high": 2.0}, "optimizer": {"name": "adamw", "learning_rate": 0.00024, "betas": [0.9, 0.999], "epsilon": 1e-08, "momentum": 0.0, "weight_decay": 0.0, "max_grad_norm": 1.0, "schedule": "constant", "warmup_steps": 0}, "precision": "fp32", "zero_stage": 0, "lora": null, "mini_batches": 1, "token_budget": 4096, "packing": "auto"}, "evaluation": {"benchmarks": ["word_problems"], "data_root": null, "template": "auto", "every_steps": 10, "samples_per_prompt": 4, "num_problems": 256, "full_at_end": false, "max_new_tokens": null, "at_start": true}, "checkpoint": {"every_steps": 10, "keep_last": 2, "keep_best": 1}, "diagnostics": {"trajectory_every": 0, "noise_floor": false}, "budget": {"steps": 40, "backward_passes": null, "hours": null, "tokens": null}, "placement": {"learner_ranks": 1, "samplers": 1, "tensor_parallel": 1, "device": "auto", "colocate": "auto", "learner_cpus": 1.0, "sampler_cpus": 0.75, "verifier_cpus": 0.25, "learner_threads": null, "sampler_threads": null, "ray_address": null, "strategy": "pack", "weight_transport": "auto", "wait_s": 600.0, "max_restarts": 3}, "timeouts": {"setup_s": 3600.0, "sampling_s": 1800.0, "verifying_s": 900.0, "updating_s": 3600.0, "syncing_s": 900.0, "evaluating_s": 1800.0, "checkpointing_s": 3600.0}}','{"policy_sha256": "p", "versions": {"NaN": ["Infinity", 1]}}');
INSERT INTO "run_documents" VALUES(2,'{"name": "grpo", "seed": 0, "model": {"path": "starter", "revision": null, "trust_remote_code": false, "max_length": 4096, "attention": "auto", "gradient_checkpointing": "auto"}, "data": {"source": "word_problems", "split": "train", "subset": null, "prompt_field": "problem", "answer_field": "answer", "template": "auto", "levels": null, "num_problems": 4096, "difficulty": ["easy", "medium", "hard"], "contamination": "drop", "max_prompt_tokens": 1024, "shuffle": true}, "rollout": {"prompts_per_step": 64, "samples_per_prompt": 8, "max_new_tokens": 48, "ignore_eos": false, "temperature": 1.0, "top_p": 1.0, "deterministic": false, "logprob_gap_mean_limit": null, "logprob_gap_max_limit": null, "dtype": "auto", "gpu_memory_utilization": 0.4, "cpu_kv_cache_gib": 1, "max_num_seqs": 512, "enforce_eager": true, "async_depth": 0, "update_in_flight": false}, "environment": {"name": "single_turn", "url": null, "action_field": "message", "observation_field": null, "max_turns": 4, "max_observation_tokens": 64, "deadline_s": 5.0, "workers": 4, "memory_mb": 1024}, "verifier": {"workers": 2, "deadline_s": 5.0, "memory_mb": 2048, "rewards": [{"name": "correctness", "weight": 1.0}], "max_failed_fraction": 0.2}, "learner": {"rule": {"name": "grpo"}, "loss": {"surrogate": "ppo", "clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.0, "aggregation": "token_mean", "advantage_std": true, "advantage_epsilon": 1e-06, "zero_variance": "keep", "resample_limit": 3, "mask_truncated": false, "proximal": "auto", "correction": "auto", "importance_low": 0.5, "importance_high": 2.0}, "optimizer": {"name": "adamw", "learning_rate": 1e-05, "betas": [0.9, 0.999], "epsilon": 1e-08, "momentum": 0.0, "weight_decay": 0.0, "max_grad_norm": 1.0, "schedule": "constant", "warmup_steps": 0}, "precision": "fp32", "zero_stage": 0, "lora": null, "mini_batches": 1, "token_budget": 4096, "packing": "auto"}, "evaluation": {"benchmarks": ["word_problems"], "data_root": null, "template": "auto", "every_steps": 10, "samples_per_prompt": 4, "num_problems": 256, "full_at_end": false, "max_new_tokens": null, "at_start": true}, "checkpoint": {"every_steps": 10, "keep_last": 2, "keep_best": 1}, "diagnostics": {"trajectory_every": 0, "noise_floor": false}, "budget": {"steps": 5, "backward_passes": null, "hours": null, "tokens": null}, "placement": {"learner_ranks": 1, "samplers": 1, "tensor_parallel": 1, "device": "auto", "colocate": "auto", "learner_cpus": 1.0, "sampler_cpus": 0.75, "verifier_cpus": 0.25, "learner_threads": null, "sampler_threads": null, "ray_address": null, "strategy": "pack", "weight_transport": "auto", "wait_s": 600.0, "max_restarts": 3}, "timeouts": {"setup_s": 3600.0, "sampling_s": 1800.0, "verifying_s": 900.0, "updating_s": 3600.0, "syncing_s": 900.0, "evaluating_s": 1800.0, "checkpointing_s": 3600.0}}',NULL);
CREATE TABLE run_searches (
	run_number INTEGER NOT NULL, 
	text TEXT NOT NULL, 
	CONSTRAINT pk_run_searches PRIMARY KEY (run_number), 
	CONSTRAINT fk_run_searches_run_number FOREIGN KEY(run_number) REFERENCES runs (number) ON DELETE CASCADE
);
INSERT INTO "run_searches" VALUES(1,'grösse π
first
r01m85w2e4t8wtbz4w2nz
starter
demo
π');
INSERT INTO "run_searches" VALUES(2,'grpo

r01m85w2e7dhdmxmeat73
starter');
CREATE TABLE run_tags (
	run_number INTEGER NOT NULL, 
	tag VARCHAR(60) NOT NULL, 
	CONSTRAINT pk_run_tags PRIMARY KEY (run_number, tag), 
	CONSTRAINT fk_run_tags_run_number FOREIGN KEY(run_number) REFERENCES runs (number) ON DELETE CASCADE
);
INSERT INTO "run_tags" VALUES(1,'demo');
INSERT INTO "run_tags" VALUES(1,'π');
CREATE TABLE runs (
	number INTEGER NOT NULL, 
	id VARCHAR(32) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	notes TEXT NOT NULL, 
	priority INTEGER NOT NULL, 
	archived BOOLEAN NOT NULL, 
	group_number INTEGER, 
	group_values JSON, 
	parent_id VARCHAR(32), 
	parent_kind VARCHAR(10), 
	config_sha256 VARCHAR(64) NOT NULL, 
	rule VARCHAR(20) NOT NULL, 
	model VARCHAR(400) NOT NULL, 
	seed BIGINT NOT NULL, 
	cpus DOUBLE NOT NULL, 
	gpus DOUBLE NOT NULL, 
	created_by VARCHAR(100) NOT NULL, 
	created_by_id VARCHAR(32) NOT NULL, 
	state VARCHAR(20) NOT NULL, 
	reason VARCHAR(40), 
	detail TEXT NOT NULL, 
	ended_by VARCHAR(20), 
	created_at DOUBLE NOT NULL, 
	updated_at DOUBLE NOT NULL, 
	queued_at DOUBLE NOT NULL, 
	started_at DOUBLE, 
	ended_at DOUBLE, 
	lease_owner VARCHAR(64), 
	lease_token INTEGER NOT NULL, 
	lease_expires_at DOUBLE, 
	launch INTEGER NOT NULL, 
	job_id VARCHAR(64), 
	run_token_sha256 VARCHAR(64), 
	launched_at DOUBLE, 
	heartbeat_at DOUBLE, 
	wish_at DOUBLE, 
	recoveries INTEGER NOT NULL, 
	last_batch INTEGER NOT NULL, 
	offsets JSON NOT NULL, 
	attempt INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	backward_passes DOUBLE NOT NULL, 
	tokens DOUBLE NOT NULL, 
	training_s DOUBLE NOT NULL, 
	score DOUBLE, 
	score_best DOUBLE, 
	score_step INTEGER, rule_label VARCHAR(100) DEFAULT '' NOT NULL, step_budget BIGINT, backward_passes_budget BIGINT, tokens_budget BIGINT, hours_budget DOUBLE, phase VARCHAR(200), pruned_at DOUBLE, 
	CONSTRAINT pk_runs PRIMARY KEY (number), 
	CONSTRAINT fk_runs_group_number FOREIGN KEY(group_number) REFERENCES groups (number), 
	CONSTRAINT uq_runs_id UNIQUE (id)
);
INSERT INTO "runs" VALUES(1,'r01m85w2e4t8wtbz4w2nz','Größe π','first',0,0,1,'null',NULL,NULL,'b0f914e002c47b3d9270055aac2ed6b46446e282feebb874af37cec6af8d3659','gxpo','starter',0,2.0,1.0,'ada','t01m85w2dcgsbs3jr2epy','succeeded','steps_done','','steps',1.79549354206483936314e+09,1.79549354224339222912e+09,1.79549354206483936314e+09,1.7954935422123529911e+09,1.79549354224339222912e+09,NULL,1,NULL,1,NULL,NULL,NULL,1.79549354223584747315e+09,NULL,0,2,'{"metrics": 4, "samples": 2, "evaluations": 1, "events": 1}',2,3,6.0,200.0,4.0,NULL,NULL,NULL,'GXPO K=5',40,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "runs" VALUES(2,'r01m85w2e7dhdmxmeat73','grpo','',0,0,NULL,'null',NULL,NULL,'dddc27b8773d828c3e636dbae038e9b1da71e5f0b36a6c702791dca726791468','grpo','starter',0,2.0,1.0,'ada','t01m85w2dcgsbs3jr2epy','queued',NULL,'',NULL,1.79549354215063810343e+09,1.79549354215063810343e+09,1.79549354215063810343e+09,NULL,NULL,NULL,0,NULL,0,NULL,NULL,NULL,NULL,NULL,0,0,'{}',0,0,0.0,0.0,0.0,NULL,NULL,NULL,'GRPO',5,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE samples (
	number INTEGER NOT NULL, 
	run_number INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	time DOUBLE NOT NULL, 
	group_index INTEGER NOT NULL, 
	sample_index INTEGER NOT NULL, 
	prompt_id VARCHAR(300) NOT NULL, 
	prompt TEXT NOT NULL, 
	response TEXT NOT NULL, 
	extracted TEXT, 
	gold TEXT NOT NULL, 
	verdict VARCHAR(20) NOT NULL, 
	reward DOUBLE, 
	length INTEGER NOT NULL, 
	truncated BOOLEAN NOT NULL, 
	extra JSON NOT NULL, turns JSON, "end" VARCHAR(20), end_detail TEXT, sampled_length INTEGER, 
	CONSTRAINT pk_samples PRIMARY KEY (number), 
	CONSTRAINT fk_samples_run_number FOREIGN KEY(run_number) REFERENCES runs (number) ON DELETE CASCADE
);
INSERT INTO "samples" VALUES(1,1,1,1,1.5,0,0,'p1','1+1?','it is \boxed{2}','2','2','correct',1.0,7,0,'{"detail": "", "weights_version": 0}',NULL,NULL,NULL,NULL);
INSERT INTO "samples" VALUES(2,1,1,2,1.5,0,1,'p1','1+1?','it is \boxed{2}','2','2','correct',1.0,7,0,'{"detail": "", "weights_version": 0}','[{"speaker": "policy", "text": "<calc>1+1</calc>", "reward": null}, {"speaker": "environment", "text": "2", "reward": 0.5}, {"speaker": "policy", "text": "it is \\boxed{2}", "reward": null}]','done',NULL,11);
CREATE TABLE schedulers (
	owner VARCHAR(64) NOT NULL, 
	ticked_at DOUBLE NOT NULL, 
	launches INTEGER NOT NULL, 
	recoveries INTEGER NOT NULL, 
	lost_leases INTEGER NOT NULL, 
	claims INTEGER NOT NULL, 
	queue_wait_s DOUBLE NOT NULL, 
	CONSTRAINT pk_schedulers PRIMARY KEY (owner)
);
INSERT INTO "schedulers" VALUES('host-1',1800000000.0,2,1,0,2,3.5);
CREATE TABLE tokens (
	id VARCHAR(32) NOT NULL, 
	name VARCHAR(100) NOT NULL, 
	role VARCHAR(20) NOT NULL, 
	sha256 VARCHAR(64) NOT NULL, 
	created_at DOUBLE NOT NULL, 
	created_by VARCHAR(100) NOT NULL, 
	expires_at DOUBLE, 
	revoked_at DOUBLE, last_used_at DOUBLE, 
	CONSTRAINT pk_tokens PRIMARY KEY (id), 
	CONSTRAINT uq_tokens_sha256 UNIQUE (sha256)
);
INSERT INTO "tokens" VALUES('t01m85w2dcgsbs3jr2epy','ada','admin','3cfea95e3f531b6e491e30fb96014bfbd8f2e3b9d19fef68511554466e01e24e',1795493541.26418,'first start',NULL,NULL,1.79549354218758273121e+09);
INSERT INTO "tokens" VALUES('t01m85w2ddwwv64fntyvf','old viewer','viewer','e30f9da5f518de5fa03fbb998ff411bc1f9402ec1aa642d8fbec8da4cd1d9a7c',1.79549354130873703959e+09,'token:ada',1.79557994130873703952e+09,NULL,NULL);
CREATE INDEX ix_runs_config_sha256 ON runs (config_sha256);
CREATE INDEX ix_runs_group_number ON runs (group_number);
CREATE INDEX ix_runs_model ON runs (model);
CREATE INDEX ix_evaluations_step ON evaluations (run_number, benchmark, step);
CREATE INDEX ix_events_run_number ON events (run_number);
CREATE INDEX ix_run_tags_tag ON run_tags (tag);
CREATE INDEX ix_samples_step ON samples (run_number, step, attempt);
CREATE INDEX ix_runs_created ON runs (archived, created_at, number);
CREATE INDEX ix_runs_name ON runs (archived, name, number);
CREATE INDEX ix_runs_rule ON runs (archived, rule, state, created_at, number);
CREATE INDEX ix_runs_state ON runs (archived, state, created_at, number);
CREATE INDEX ix_metric_last_sort ON metric_last (name_number, last, run_number);
CREATE INDEX ix_runs_score ON runs (archived, score, number);
CREATE INDEX ix_runs_score_best ON runs (archived, score_best, number);
CREATE INDEX ix_runs_queue ON runs (state, priority, queued_at, number);
COMMIT;
