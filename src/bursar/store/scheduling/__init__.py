"""The leader's row, questions to the leader, and figures of queues."""
