-- A role for Grafana that reads curves, jobs and which hardware scored, and nothing else: no API keys, no tokens, no leases. Safe to run again.
-- The password comes from the environment, so that it is in no argument list and no log.
\getenv password READER_PASSWORD
SELECT 'CREATE ROLE foreshock_reader LOGIN' WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'foreshock_reader') \gexec
ALTER ROLE foreshock_reader PASSWORD :'password';
ALTER ROLE foreshock_reader SET default_transaction_read_only = on;
ALTER ROLE foreshock_reader SET statement_timeout = '15s';
ALTER ROLE foreshock_reader CONNECTION LIMIT 10;
GRANT USAGE ON SCHEMA public TO foreshock_reader;
GRANT SELECT ON runs, attempts, steps, measurements, scalars, probes, probe_jobs, scores TO foreshock_reader;
