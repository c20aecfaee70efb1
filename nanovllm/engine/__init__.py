"""The engine: the scheduler side decides who runs, the runner side computes."""
