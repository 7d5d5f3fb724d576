-- Who submitted what is a field that selectors can ask for: `status.user`, beside the phase.
--
-- One pass over what somebody submitted and has not been forgotten. No column with an index changes, so rows are
-- rewritten on their own pages, where half is kept free for that. Nothing that an object shows changes: its revision
-- stays. Whoever still writes is waited for, and then waits; so no row is locked by turns.
LOCK TABLE object IN SHARE ROW EXCLUSIVE MODE;
UPDATE object
   SET fields = fields || jsonb_build_object('status.user', status ->> 'user')
 WHERE kind IN ('Allocation', 'Job')
   AND status ->> 'user' <> '';
-- Of jobs it is known where their allocations go, also where only the template says so.
UPDATE object
   SET fields = fields || jsonb_build_object('spec.template.spec.queue', doc #>> '{spec,template,spec,queue}')
 WHERE kind = 'Job'
   AND doc #>> '{spec,template,spec,queue}' <> '';

-- The feed's older lines do not say whose they are of, and may be many: whoever watched from there lists again.
UPDATE revision SET floor = value;
