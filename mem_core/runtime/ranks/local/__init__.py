"""Ranks of one machine: forked from a warm server, watched through memory-mapped files, agreeing through a shared page.

The supervisor's side runs in the driver's process: `ranks` (`LocalRanks`), `group` (the ranks of one try), `processes` and `fork_server`
(how they are born and how their end is known), `pump` (the one reader of their words), `silence` (who holds the group up),
`first_cause` (whose fault it was), `places`. Both sides share `heartbeat`, `board` and `memory_board`; `shared_page` is the rank's
`Agreement` over the latter two.

Called by those alone who put parts together: the composition root, deep verification, `worker.main` inside a rank. Drills read
heartbeats from outside.

Never here: an open port, a lock, a wait without a bound, a file outside the try's own folder and the run's logs. After `stop` neither
a process nor a file of the try is left; when the driver is killed, the kernel ends its fork server and ranks.
"""
