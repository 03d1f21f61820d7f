"""What runs in the engine process: worker, runner, scheduler, probes and outbox."""
