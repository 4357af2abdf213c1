"""Pages for people: what a store holds, how a run goes."""
