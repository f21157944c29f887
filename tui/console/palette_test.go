package console

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"constellation/tui/internal/enginefake"
	"constellation/tui/term"
)

// The palette finds each binding of a screen by its words, runs it, and shows why one is off.
func TestPaletteDoesWhatKeysDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := live(5, 70*time.Second)(t, func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{}, 80, 24) })
		s.view([]string{":", "a", "l", "l", " ", "n", "o", "d", "enter"})
		if s.c.watch.lens != lensMap || s.c.pal.open {
			t.Errorf("%q leads to %s", "all nod", s.c.watch.title())
		}
		s.view([]string{":", "f", "a", "s", "t", "e", "r", "enter"})
		if !strings.Contains(s.c.note, "+ is off: this is not a replay") {
			t.Errorf("note %q", s.c.note)
		}
		s.view([]string{":", "x", "x", "x", "enter"})
		if !s.c.pal.open || s.c.note != "no action matches" {
			t.Errorf("open %v, note %q", s.c.pal.open, s.c.note)
		}
		s.press("esc")
		if s.c.pal.open || s.c.watch.lens != lensMap {
			t.Error("Esc does not close only the palette")
		}
		s.press(":")
		for _, b := range slices.Concat(s.c.screen.keys(), s.c.globalKeys()) {
			s.c.pal.text = b.help
			if b.label != ":" && !slices.ContainsFunc(s.c.pal.matches(s.c.actions()), func(o binding) bool { return o.help == b.help }) {
				t.Errorf("%q is not found by its words", b.help)
			}
		}
		s.press("esc", ":", "down", "down", "enter") // the third of all: left
		if s.c.pal.open {
			t.Error("Enter leaves it open")
		}
	})
}
