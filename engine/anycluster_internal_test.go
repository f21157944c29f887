package engine

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"constellation/engine/plan"
	"constellation/engine/rollout"
)

// stuckSource counts the looks for stuck drains; answer is the answer to each.
type stuckSource struct {
	foreign
	looks  int
	answer func(ctx context.Context) ([]plan.Finding, error)
}

func (s *stuckSource) StuckDrains(ctx context.Context) ([]plan.Finding, error) {
	s.looks++
	return s.answer(ctx)
}

// TestStuckDrainsArePaced watches for two minutes, with an observation every second.
func TestStuckDrainsArePaced(t *testing.T) {
	stuck := []plan.Finding{{ID: "stuck"}}
	for _, tt := range []struct {
		name      string
		disturbed bool
		answer    func(ctx context.Context) ([]plan.Finding, error)
		looks     int
		found     int
		took      time.Duration
	}{
		{
			name:   "all nodes are ready",
			answer: func(context.Context) ([]plan.Finding, error) { return stuck, nil },
			took:   120 * time.Second,
		},
		{
			name: "a node is cordoned", disturbed: true,
			answer: func(context.Context) ([]plan.Finding, error) { return stuck, nil },
			looks:  4, found: 1, took: 120 * time.Second,
		},
		{
			name: "the source fails", disturbed: true,
			answer: func(context.Context) ([]plan.Finding, error) { return nil, errors.New("forbidden") },
			looks:  4, took: 120 * time.Second,
		},
		{
			name: "the source does not answer", disturbed: true,
			answer: func(ctx context.Context) ([]plan.Finding, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			},
			looks: 6, took: 180 * time.Second,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &stuckSource{answer: tt.answer}
				var a advice
				var found []plan.Finding
				began := time.Now()
				for range 120 {
					found = a.look(t.Context(), unmanaged{f: s}, &rollout.View{At: time.Now(), Disturbed: tt.disturbed})
					time.Sleep(time.Second)
				}
				if took := time.Since(began); s.looks != tt.looks || len(found) != tt.found || took != tt.took {
					t.Errorf("%d looks, %d found in %s, want %d, %d in %s", s.looks, len(found), took, tt.looks, tt.found, tt.took)
				}
			})
		})
	}
}

func TestRolloutEndsWithItsNodes(t *testing.T) {
	view := func(reached bool, current int64) *rollout.View {
		v := &rollout.View{Current: current, Total: 3}
		v.Observed, v.Reached = true, reached
		return v
	}
	for _, tt := range []struct {
		name  string
		views []*rollout.View
		want  int // number of the last observation; 0: none is the last
	}{
		{name: "all nodes are at the target", views: []*rollout.View{view(false, 2), view(true, 3)}, want: 2},
		{name: "a node is seen late", views: []*rollout.View{view(true, 2), view(true, 3)}, want: 2},
		{name: "the target has changed meanwhile", views: []*rollout.View{view(true, 2), view(true, 2), view(false, 2), view(true, 2), view(true, 2)}},
		{name: "a node stays behind", views: []*rollout.View{view(true, 2), view(true, 2), view(true, 2)}, want: 3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var e ending
			got := 0
			for i, v := range tt.views {
				if e.seen(v) {
					got = i + 1
					break
				}
			}
			if got != tt.want {
				t.Errorf("observation %d is the last, want %d", got, tt.want)
			}
		})
	}
}
