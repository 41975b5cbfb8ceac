"""Draft policies: what a draft model remembers while it proposes. One policy per file; see docs/add-a-draft.md."""
