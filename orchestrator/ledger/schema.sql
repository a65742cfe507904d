-- Written by `python -m orc.orchestrator.ledger.schema`; do not edit.

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
  source TEXT NOT NULL,
  digests TEXT NOT NULL,
  spec TEXT NOT NULL,
  CONSTRAINT pk_jobs PRIMARY KEY (id)
);

CREATE INDEX ix_jobs_created_at ON jobs (created_at);

CREATE INDEX ix_jobs_name_created_at ON jobs (name, created_at);

CREATE INDEX ix_jobs_state_created_at ON jobs (state, created_at);

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
  CONSTRAINT pk_attempts PRIMARY KEY (job_id, number),
  CONSTRAINT fk_attempts_job_id FOREIGN KEY(job_id) REFERENCES jobs (id),
  CONSTRAINT uq_attempts_marker UNIQUE (marker)
);

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

CREATE TRIGGER events_no_delete BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;

CREATE TABLE alembic_version (
  version_num VARCHAR(32) NOT NULL,
  CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);

INSERT INTO alembic_version (version_num) VALUES ('0003');
