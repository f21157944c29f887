package term

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestRepliesAreRemovedFromTheInput(t *testing.T) {
	const colour, what = "\x1b]11;rgb:1111/2222/3333\x1b\\", "\x1b[?64;1;2c"
	for _, tt := range []struct {
		name string
		in   []string
		want string
	}{
		{name: "whole", in: []string{colour + what + "q"}, want: "q"},
		{name: "with keys around", in: []string{"a" + colour + "b" + what + "c"}, want: "abc"},
		{name: "split in the colour", in: []string{colour[:9], colour[9:] + what + "q"}, want: "q"},
		{name: "split in the beginning", in: []string{colour[:3], colour[3:] + what + "q"}, want: "q"},
		{name: "split in the second reply", in: []string{colour + what[:5], what[5:] + "q"}, want: "q"},
		{name: "only device attributes", in: []string{what + "q"}, want: "q"},
		{name: "Escape is a key", in: []string{"\x1b"}, want: "\x1b"},
		{name: "arrows are keys", in: []string{"\x1b[A\x1b[B"}, want: "\x1b[A\x1b[B"},
		{name: "after the reply all input is keys", in: []string{what, what}, want: what},
	} {
		r := &replies{}
		r.expect(time.Now())
		var got []byte
		for _, s := range tt.in {
			b := append(bytes.Clone(r.partial), s...)
			r.partial = nil
			got = append(got, r.take(b)...)
		}
		if string(got) != tt.want {
			t.Errorf("%s: keys %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestLookOfTheEnvironment(t *testing.T) {
	for _, tt := range []struct {
		env  string
		want Display
	}{
		{"TERM=xterm-256color LANG=en_US.UTF-8", Display{Colours: Colours256}},
		{"TERM=xterm LANG=de_DE.utf8", Display{Colours: Colours16}},
		{"TERM=xterm LANG=C", Display{Colours: Colours16, Ascii: true}},
		{"TERM=xterm", Display{Colours: Colours16, Ascii: true}},
		{"TERM=xterm-kitty LC_ALL=C.UTF-8 LANG=C", Display{Colours: TrueColour}},
		{"TERM=xterm LC_ALL=C LANG=C.UTF-8", Display{Colours: Colours16, Ascii: true}},
		{"TERM=screen COLORTERM=truecolor LANG=C.UTF-8", Display{Colours: TrueColour}},
		{"TERM=tmux LANG=C.UTF-8", Display{Colours: Colours256}},
		{"TERM=xterm-256color NO_COLOR=1 LANG=C.UTF-8", Display{}},
		{"TERM=xterm-256color NO_COLOR=anything LANG=C.UTF-8", Display{}},
		{"TERM=xterm COLORFGBG=0;15 LANG=C.UTF-8", Display{Colours: Colours16, Light: true}},
		{"TERM=xterm COLORFGBG=15;default;0 LANG=C.UTF-8", Display{Colours: Colours16}},
	} {
		env := map[string]string{}
		for kv := range strings.FieldsSeq(tt.env) {
			k, v, _ := strings.Cut(kv, "=")
			env[k] = v
		}
		if got := DisplayOf(func(k string) string { return env[k] }); got != tt.want {
			t.Errorf("%s: %+v, want %+v", tt.env, got, tt.want)
		}
	}
}

// An emulator of the sequences that paint uses must show exactly the frame, whatever was on
// the screen before.
func TestPaintShowsTheFrame(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	tty := &Terminal{Out: w, Live: true, Width: 20, Height: 4}
	frames := []string{
		"one\ntwo\nthree\nfour", "one\n2\nthree\nfour", "one\n2", "exactly twenty chars\nab", "x", "日本語\n\x1b[31mred\x1b[0m\nend",
		"a\nb\nc\nd\ne is beyond the screen", "this line is longer than the screen is wide",
	}
	want := [][]string{
		{"one", "two", "three", "four"},
		{"one", "2", "three", "four"},
		{"one", "2", "", ""},
		{"exactly twenty chars", "ab", "", ""},
		{"x", "", "", ""},
		{"日本語", "red", "end", ""},
		{"a", "b", "c", "d"},
		{"this line is longer ", "", "", ""},
	}
	screen := newEmulator(20, 4)
	go func() {
		for _, f := range frames {
			tty.Paint(f)
			_, _ = w.WriteString("\x00") // end of a frame
		}
		w.Close()
	}()
	all, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	for i, b := range bytes.Split(bytes.TrimSuffix(all, []byte{0}), []byte{0}) {
		screen.write(t, string(b))
		for y, l := range want[i] {
			if got := screen.line(y); got != strings.TrimRight(l, " ") {
				t.Errorf("frame %d, line %d shows %q, want %q", i+1, y+1, got, l)
			}
		}
	}
}

// TestPaintShowsAnyFrame paints frames of random lines, styles, widths and sizes: the screen
// must show the last one, whatever was there before.
func TestPaintShowsAnyFrame(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	words := []string{"a", "bc", " ", "   ", "ready", "█", "▒▒", "·", "日", "→", "0", "12", "e\u0301"}
	styles := []string{"", "\x1b[1m", "\x1b[38;5;111m", "\x1b[31m\x1b[1m"}
	line := func(w int) string {
		var b strings.Builder
		for used := 0; ; {
			x := words[rnd.IntN(len(words))]
			if used += Width(x); used > w || rnd.IntN(12) == 0 {
				return b.String()
			}
			st := styles[rnd.IntN(len(styles))]
			b.WriteString(st + x)
			if st != "" {
				b.WriteString(seqReset)
			}
		}
	}
	for range 40 {
		w, h := 8+rnd.IntN(60), 1+rnd.IntN(6)
		f, err := os.CreateTemp(t.TempDir(), "out")
		if err != nil {
			t.Fatal(err)
		}
		tty := &Terminal{Out: f, Live: true, Width: w, Height: h}
		screen := newEmulator(w, h)
		var lines []string
		from := int64(0)
		for n := range 60 {
			if n%5 == 0 || len(lines) != h {
				lines = make([]string, h)
				for i := range lines {
					lines[i] = line(w)
				}
			} else {
				lines = slices.Clone(lines)
				lines[rnd.IntN(h)] = line(w)
				// A change of a few columns of a line is the most frequent one.
				if i := rnd.IntN(h); strings.Contains(lines[i], "ready") {
					lines[i] = strings.Replace(lines[i], "ready", "reedy", 1)
				}
			}
			tty.Paint(strings.Join(lines, "\n"))
			end, err := f.Seek(0, io.SeekCurrent)
			if err != nil {
				t.Fatal(err)
			}
			b := make([]byte, end-from)
			if _, err := f.ReadAt(b, from); err != nil && len(b) > 0 {
				t.Fatal(err)
			}
			from = end
			screen.write(t, string(b))
			for y, l := range lines {
				want := strings.TrimRight(strings.ReplaceAll(StripStyle(l), "e\u0301", "e"), " ")
				if got := strings.ReplaceAll(screen.line(y), "e\u0301", "e"); got != want {
					t.Fatalf("%dx%d, frame %d, line %d shows %q, want %q", w, h, n, y+1, got, want)
				}
				glyphs, ok := glyphsOf(l, nil)
				for x := range glyphs {
					if got := screen.styles[y][x]; ok && glyphs[x] != blank && got != glyphs[x].style {
						t.Fatalf("%dx%d, frame %d, line %d, column %d has style %q, want %q", w, h, n, y+1, x+1, got, glyphs[x].style)
					}
				}
			}
		}
		f.Close()
	}
}

// emulator is a terminal that supports the sequences of paint and fails on all others.
type emulator struct {
	cells  [][]rune
	styles [][]string
	style  string
	x, y   int
}

func newEmulator(w, h int) *emulator {
	e := &emulator{cells: make([][]rune, h), styles: make([][]string, h)}
	for i := range e.cells {
		e.cells[i], e.styles[i] = make([]rune, w), make([]string, w)
	}
	e.clear(0, 0, h)
	return e
}

func (e *emulator) clear(x, y, rows int) {
	for i := y; i < y+rows; i++ {
		for j := range e.cells[i] {
			if i > y || j >= x {
				e.cells[i][j], e.styles[i][j] = ' ', ""
			}
		}
	}
}

func (e *emulator) line(y int) string {
	return strings.TrimRight(strings.ReplaceAll(string(e.cells[y]), "\x01", ""), " ")
}

func (e *emulator) write(t *testing.T, s string) {
	t.Helper()
	for len(s) > 0 {
		if s[0] == 0x1b {
			end := strings.IndexAny(s[1:], "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz") + 2
			seq := s[:end]
			s = s[end:]
			switch {
			case seq == seqSyncOn || seq == seqSyncOff:
			case seq == seqReset:
				e.style = ""
			case strings.HasSuffix(seq, "m"):
				if !colourOnly(e.style) || !colourOnly(seq) {
					seq = e.style + seq
				}
				e.style = seq
			case strings.HasSuffix(seq, "G"):
				if _, err := fmt.Sscanf(seq, "\x1b[%dG", &e.x); err != nil {
					t.Fatalf("sequence %q: %v", seq, err)
				}
				e.x--
			case seq == seqClear:
				e.clear(0, 0, len(e.cells))
			case seq == seqClearRight:
				e.clear(e.x, e.y, 1)
			case strings.HasSuffix(seq, "H"):
				if _, err := fmt.Sscanf(seq, "\x1b[%d;%dH", &e.y, &e.x); err != nil {
					t.Fatalf("sequence %q: %v", seq, err)
				}
				e.x, e.y = e.x-1, e.y-1
			default:
				t.Fatalf("unknown sequence %q", seq)
			}
			continue
		}
		r := []rune(s)[0]
		s = s[len(string(r)):]
		w := Width(string(r))
		if w == 0 { // a mark on the character before
			continue
		}
		if e.x+w > len(e.cells[e.y]) {
			t.Fatalf("line %d is written beyond the edge", e.y+1)
		}
		e.cells[e.y][e.x], e.styles[e.y][e.x] = r, e.style
		for i := 1; i < w; i++ {
			e.cells[e.y][e.x+i] = 1
		}
		e.x += w
	}
}
