-- Written by `python -m orc.orchestrator.ledger.schema`; do not edit.

CREATE TABLE audit (
  id INTEGER NOT NULL,
  at DOUBLE NOT NULL,
  username VARCHAR(255) NOT NULL,
  token_id VARCHAR(64),
  address VARCHAR(255) NOT NULL,
  action VARCHAR(64) NOT NULL,
  subject TEXT NOT NULL,
  data TEXT NOT NULL,
  CONSTRAINT pk_audit PRIMARY KEY (id)
);

CREATE INDEX ix_audit_username_id ON audit (username, id);

CREATE TABLE audit_intents (
  id VARCHAR(64) NOT NULL,
  at DOUBLE NOT NULL,
  line TEXT NOT NULL,
  alive_at DOUBLE,
  CONSTRAINT pk_audit_intents PRIMARY KEY (id)
);

CREATE TABLE audit_limits (
  "before" DOUBLE NOT NULL,
  CONSTRAINT pk_audit_limits PRIMARY KEY ("before")
);

CREATE TABLE cluster_polls (
  cluster VARCHAR(255) NOT NULL,
  account VARCHAR(255) NOT NULL,
  lease_owner VARCHAR(255),
  lease_expires_at DOUBLE,
  next_at DOUBLE,
  interval_s DOUBLE,
  polled_at DOUBLE,
  answered_at DOUBLE,
  error TEXT,
  CONSTRAINT pk_cluster_polls PRIMARY KEY (cluster, account)
);

CREATE TABLE content_holders (
  username VARCHAR(255) NOT NULL,
  digest VARCHAR(64) NOT NULL,
  at DOUBLE NOT NULL,
  CONSTRAINT pk_content_holders PRIMARY KEY (username, digest)
);

CREATE TABLE duties (
  name VARCHAR(64) NOT NULL,
  lease_owner VARCHAR(255),
  lease_expires_at DOUBLE,
  next_at DOUBLE,
  done_at DOUBLE,
  CONSTRAINT pk_duties PRIMARY KEY (name)
);

CREATE TABLE groups (
  id VARCHAR(64) NOT NULL,
  kind VARCHAR(16) NOT NULL,
  name VARCHAR(255) NOT NULL,
  owner VARCHAR(255) NOT NULL,
  created_at DOUBLE NOT NULL,
  max_parallel INTEGER,
  spec TEXT NOT NULL,
  CONSTRAINT pk_groups PRIMARY KEY (id)
);

CREATE INDEX ix_groups_created_at_id ON groups (created_at, id);

CREATE TABLE jobs (
  id VARCHAR(64) NOT NULL,
  name VARCHAR(255) NOT NULL,
  cluster VARCHAR(255) NOT NULL,
  backend VARCHAR(64) NOT NULL,
  state VARCHAR(16) NOT NULL,
  reason TEXT NOT NULL,
  attempt INTEGER NOT NULL,
  revision INTEGER NOT NULL,
  created_at DOUBLE NOT NULL,
  updated_at DOUBLE NOT NULL,
  ended_at DOUBLE,
  next_attempt_at DOUBLE,
  cancel_requested_at DOUBLE,
  cancel_grace_s DOUBLE,
  poll_error_at DOUBLE,
  claim_owner VARCHAR(255),
  claim_expires_at DOUBLE,
  owner VARCHAR(255) DEFAULT '' NOT NULL,
  project VARCHAR(255) DEFAULT '' NOT NULL,
  priority INTEGER DEFAULT '0' NOT NULL,
  group_id VARCHAR(64),
  group_index INTEGER,
  not_before DOUBLE,
  deadline_at DOUBLE,
  source TEXT NOT NULL,
  digests TEXT NOT NULL,
  spec TEXT NOT NULL,
  CONSTRAINT pk_jobs PRIMARY KEY (id)
);

CREATE INDEX ix_jobs_cluster_created_at_id ON jobs (cluster, created_at, id);

CREATE INDEX ix_jobs_group_id_group_index ON jobs (group_id, group_index);

CREATE INDEX ix_jobs_name_created_at_id ON jobs (name, created_at, id);

CREATE INDEX ix_jobs_newest ON jobs (created_at, id, name, owner, cluster, project);

CREATE INDEX ix_jobs_owner_created_at_id ON jobs (owner, created_at, id);

CREATE INDEX ix_jobs_project_created_at_id ON jobs (project, created_at, id);

CREATE INDEX ix_jobs_state_created_at_id ON jobs (state, created_at, id);

CREATE TABLE notifications (
  id INTEGER NOT NULL,
  event_id BIGINT NOT NULL,
  job_id VARCHAR(64) NOT NULL,
  target VARCHAR(255) NOT NULL,
  kind VARCHAR(32) NOT NULL,
  payload TEXT NOT NULL,
  state VARCHAR(16) NOT NULL,
  tries INTEGER NOT NULL,
  next_at DOUBLE NOT NULL,
  last_error TEXT NOT NULL,
  created_at DOUBLE NOT NULL,
  CONSTRAINT pk_notifications PRIMARY KEY (id),
  CONSTRAINT uq_notifications_event_id_target UNIQUE (event_id, target)
);

CREATE INDEX ix_notifications_job_id ON notifications (job_id);

CREATE INDEX ix_notifications_state_next_at ON notifications (state, next_at);

CREATE TABLE pruned_jobs (
  job_id VARCHAR(64) NOT NULL,
  at DOUBLE NOT NULL,
  CONSTRAINT pk_pruned_jobs PRIMARY KEY (job_id)
);

CREATE TABLE quotas (
  scope VARCHAR(16) NOT NULL,
  name VARCHAR(255) NOT NULL,
  resource VARCHAR(16) NOT NULL,
  amount DOUBLE NOT NULL,
  CONSTRAINT pk_quotas PRIMARY KEY (scope, name, resource)
);

CREATE TABLE schedules (
  id VARCHAR(64) NOT NULL,
  name VARCHAR(255) NOT NULL,
  owner VARCHAR(255) NOT NULL,
  cron VARCHAR(255) NOT NULL,
  timezone VARCHAR(64) NOT NULL,
  enabled BOOLEAN NOT NULL,
  next_at DOUBLE,
  last_at DOUBLE,
  last_job VARCHAR(64),
  spec TEXT NOT NULL,
  digests TEXT NOT NULL,
  source TEXT NOT NULL,
  revision INTEGER NOT NULL,
  CONSTRAINT pk_schedules PRIMARY KEY (id),
  CONSTRAINT uq_schedules_owner_name UNIQUE (owner, name)
);

CREATE INDEX ix_schedules_next_at ON schedules (next_at);

CREATE TABLE tokens (
  id VARCHAR(64) NOT NULL,
  hash VARCHAR(128) NOT NULL,
  username VARCHAR(255) NOT NULL,
  role VARCHAR(16) NOT NULL,
  note TEXT NOT NULL,
  created_at DOUBLE NOT NULL,
  expires_at DOUBLE,
  revoked_at DOUBLE,
  last_used_at DOUBLE,
  CONSTRAINT pk_tokens PRIMARY KEY (id),
  CONSTRAINT uq_tokens_hash UNIQUE (hash)
);

CREATE TABLE attempts (
  job_id VARCHAR(64) NOT NULL,
  number INTEGER NOT NULL,
  marker VARCHAR(80) NOT NULL,
  state VARCHAR(16) NOT NULL,
  cause VARCHAR(16),
  reason TEXT NOT NULL,
  plan_digest VARCHAR(64) NOT NULL,
  handle TEXT,
  prepared_at DOUBLE NOT NULL,
  submitted_at DOUBLE,
  started_at DOUBLE,
  ended_at DOUBLE,
  first_negative_at DOUBLE,
  cancel_sent_at DOUBLE,
  restarts INTEGER NOT NULL,
  hosts TEXT NOT NULL,
  progress TEXT NOT NULL,
  exit TEXT,
  sent_to TEXT,
  CONSTRAINT pk_attempts PRIMARY KEY (job_id, number),
  CONSTRAINT fk_attempts_job_id FOREIGN KEY(job_id) REFERENCES jobs (id),
  CONSTRAINT uq_attempts_marker UNIQUE (marker)
);

CREATE TABLE dependencies (
  job_id VARCHAR(64) NOT NULL,
  on_job VARCHAR(64) NOT NULL,
  condition VARCHAR(16) NOT NULL,
  CONSTRAINT pk_dependencies PRIMARY KEY (job_id, on_job),
  CONSTRAINT fk_dependencies_job_id FOREIGN KEY(job_id) REFERENCES jobs (id),
  CONSTRAINT fk_dependencies_on_job FOREIGN KEY(on_job) REFERENCES jobs (id)
);

CREATE INDEX ix_dependencies_on_job ON dependencies (on_job);

CREATE TABLE events (
  id INTEGER NOT NULL,
  job_id VARCHAR(64) NOT NULL,
  attempt INTEGER,
  at DOUBLE NOT NULL,
  kind VARCHAR(32) NOT NULL,
  data TEXT NOT NULL,
  CONSTRAINT pk_events PRIMARY KEY (id),
  CONSTRAINT fk_events_job_id FOREIGN KEY(job_id) REFERENCES jobs (id)
);

CREATE INDEX ix_events_job_id_id ON events (job_id, id);

CREATE TABLE job_tags (
  job_id VARCHAR(64) NOT NULL,
  "key" VARCHAR(255) NOT NULL,
  value VARCHAR(255) NOT NULL,
  CONSTRAINT pk_job_tags PRIMARY KEY (job_id, "key"),
  CONSTRAINT fk_job_tags_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);

CREATE INDEX ix_job_tags_key_value ON job_tags ("key", value);

CREATE TABLE late_copies (
  job_id VARCHAR(64) NOT NULL,
  attempt INTEGER NOT NULL,
  sent_to TEXT NOT NULL,
  hosts TEXT NOT NULL,
  next_at DOUBLE NOT NULL,
  until DOUBLE NOT NULL,
  CONSTRAINT pk_late_copies PRIMARY KEY (job_id, attempt, sent_to),
  CONSTRAINT fk_late_copies_job_id FOREIGN KEY(job_id) REFERENCES jobs (id)
);

CREATE INDEX ix_late_copies_next_at ON late_copies (next_at);

CREATE TABLE sealed_secrets (
  job_id VARCHAR(64) NOT NULL,
  sealed TEXT NOT NULL,
  at DOUBLE NOT NULL,
  CONSTRAINT pk_sealed_secrets PRIMARY KEY (job_id),
  CONSTRAINT fk_sealed_secrets_job_id FOREIGN KEY(job_id) REFERENCES jobs (id)
);

CREATE TABLE sightings (
  job_id VARCHAR(64) NOT NULL,
  at DOUBLE NOT NULL,
  CONSTRAINT pk_sightings PRIMARY KEY (job_id),
  CONSTRAINT fk_sightings_job_id FOREIGN KEY(job_id) REFERENCES jobs (id)
);

CREATE TABLE culprits (
  job_id VARCHAR(64) NOT NULL,
  attempt INTEGER NOT NULL,
  host VARCHAR(255) NOT NULL,
  CONSTRAINT pk_culprits PRIMARY KEY (job_id, attempt, host),
  CONSTRAINT fk_culprits_job_id_attempt FOREIGN KEY(job_id, attempt) REFERENCES attempts (job_id, number)
);

CREATE TABLE reservations (
  cluster VARCHAR(255) NOT NULL,
  host VARCHAR(255) NOT NULL,
  job_id VARCHAR(64) NOT NULL,
  attempt INTEGER NOT NULL,
  node INTEGER NOT NULL,
  slots INTEGER NOT NULL,
  at DOUBLE NOT NULL,
  CONSTRAINT pk_reservations PRIMARY KEY (job_id, attempt, node),
  CONSTRAINT fk_reservations_job_id_attempt FOREIGN KEY(job_id, attempt) REFERENCES attempts (job_id, number)
);

CREATE INDEX ix_reservations_cluster_host ON reservations (cluster, host);

CREATE TRIGGER events_no_update BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;

CREATE TRIGGER events_no_delete BEFORE DELETE ON events WHEN NOT EXISTS (SELECT 1 FROM pruned_jobs WHERE job_id = OLD.job_id) BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;

CREATE TRIGGER pruned_jobs_have_ended BEFORE INSERT ON pruned_jobs WHEN EXISTS (SELECT 1 FROM jobs WHERE id = NEW.job_id AND state NOT IN ('SUCCEEDED', 'FAILED', 'CANCELLED')) BEGIN SELECT RAISE(ABORT, 'a live job cannot be pruned'); END;

CREATE TRIGGER audit_no_update BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;

CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit WHEN NOT EXISTS (SELECT 1 FROM audit_limits WHERE before > OLD.at) BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;

CREATE TABLE alembic_version (
  version_num VARCHAR(32) NOT NULL,
  CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);

INSERT INTO alembic_version (version_num) VALUES ('0006');
