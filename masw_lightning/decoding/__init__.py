"""The speculative loop: sampling, the two verification rules, and the engine that ties drafts to a target."""
