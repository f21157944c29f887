package rollout_test

import (
	"testing"
	"time"

	"constellation/engine/rollout"
)

func TestOutlookLearnsFromWhatIsLeft(t *testing.T) {
	took := func(d time.Duration) []time.Duration { return []time.Duration{d} }
	all := rollout.Experience{Boot: took(100 * time.Second), Drain: took(20 * time.Second), Kept: took(10 * time.Second)}
	for _, tt := range []struct {
		name        string
		past        rollout.Experience
		left, kept  int
		surge       string
		least, most time.Duration
	}{
		{"all are replaced", all, 4, 0, "1", 4 * 96 * time.Second, 4 * 180 * time.Second},
		{"all are upgraded in place", all, 4, 4, "1", 4 * 8 * time.Second, 4 * 15 * time.Second},
		{"two at a time", all, 4, 4, "2", 2 * 8 * time.Second, 2 * 15 * time.Second},
		{"one is replaced, others are not", all, 4, 3, "1", 3*8*time.Second + 96*time.Second, 3*15*time.Second + 180*time.Second},
		{"replacements say nothing about nodes that stay", rollout.Experience{Boot: all.Boot, Drain: all.Drain}, 4, 4, "1", 0, 0},
		{"and nodes that stayed nothing about replacements", rollout.Experience{Kept: all.Kept}, 4, 3, "1", 0, 0},
	} {
		least, most := rollout.Over(tt.past, tt.left, tt.kept, tt.surge)
		if least != tt.least || most != tt.most {
			t.Errorf("%s: %s to %s, want %s to %s", tt.name, least, most, tt.least, tt.most)
		}
	}
}
