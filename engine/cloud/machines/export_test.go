package machines

// Limits for tests.
const (
	SeenFor     = seenFor
	ResetWithin = resetWithin
)
