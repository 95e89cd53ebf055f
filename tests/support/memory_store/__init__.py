"""The group store in memory: the twin of Postgres for the simulator, under the same contract suite."""
