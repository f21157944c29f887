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
		{name: "all are replaced", past: all, left: 4, surge: "1", least: 4 * 96 * time.Second, most: 4 * 180 * time.Second},
		{name: "all are upgraded in place", past: all, left: 4, kept: 4, surge: "1", least: 4 * 8 * time.Second, most: 4 * 15 * time.Second},
		{name: "two at a time", past: all, left: 4, kept: 4, surge: "2", least: 2 * 8 * time.Second, most: 2 * 15 * time.Second},
		{name: "one is replaced, others are not", past: all, left: 4, kept: 3, surge: "1", least: 3*8*time.Second + 96*time.Second, most: 3*15*time.Second + 180*time.Second},
		{name: "replacements say nothing about nodes that stay", past: rollout.Experience{Boot: all.Boot, Drain: all.Drain}, left: 4, kept: 4, surge: "1"},
		{name: "and nodes that stayed nothing about replacements", past: rollout.Experience{Kept: all.Kept}, left: 4, kept: 3, surge: "1"},
	} {
		least, most := rollout.Over(tt.past, tt.left, tt.kept, tt.surge)
		if least != tt.least || most != tt.most {
			t.Errorf("%s: %s to %s, want %s to %s", tt.name, least, most, tt.least, tt.most)
		}
	}
}
