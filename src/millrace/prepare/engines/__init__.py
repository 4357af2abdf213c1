"""Where tasks run. An engine is ``run(function, tasks) -> results in any order``; tasks are pure and may run twice."""
