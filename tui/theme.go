package tui

import (
	"io"
	"strings"
	"unicode/utf8"

	"github.com/charmbracelet/lipgloss"
	"github.com/muesli/termenv"
)

// style is a role of text on the screen. A state never shows by its style alone: a sign or
// a word always repeats it.
type style int

const (
	plain style = iota
	strong
	faint
	good
	caution
	bad
	accent
	chosen // the row under the cursor
	styles
)

// colours is the colour depth of a terminal.
type colours int

const (
	noColours colours = iota
	colours16
	colours256
	trueColour
)

// display are the capabilities of a terminal that rendering depends on. The same value renders
// the same frame.
type display struct {
	colours colours
	light   bool // the terminal's background is light
	ascii   bool // the locale is not UTF-8
}

// theme holds, for the capabilities of a terminal, the escape sequences before and after text
// of each style, and the signs.
type theme struct {
	display
	before, after [styles]string
	signs
	// uncut lets rows exceed their width: for print.
	uncut bool
}

// printed is the theme for lines that stay on the terminal or in a file, where long lines do
// no harm.
func (t *theme) printed() *theme {
	p := *t
	p.uncut = true
	return &p
}

// signs are the symbols of the screen.
type signs struct {
	brand, ok, warn, fail, running, pending, skipped, stopped string
	rule, heavy, bar, rest, cursor, ellipsis, dot, branch     string
	tee, arrow, to, up                                        string
	cornerTL, cornerTR, cornerBL, cornerBR, side              string
	spinner                                                   []string
}

var unicodeSigns = signs{
	brand: "◉", ok: "✓", warn: "!", fail: "✗", running: "●", pending: "○", skipped: "↷", stopped: "◌",
	rule: "─", heavy: "━", bar: "█", rest: "░", cursor: "▸", ellipsis: "…", dot: "·", branch: "└",
	tee: "├", arrow: "▶", to: "→", up: "▲",
	cornerTL: "╭", cornerTR: "╮", cornerBL: "╰", cornerBR: "╯", side: "│",
	spinner: []string{"⠋", "⠙", "⠹", "⠸", "⠼", "⠴", "⠦", "⠧", "⠇", "⠏"},
}

var asciiSigns = signs{
	brand: "@", ok: "+", warn: "!", fail: "x", running: "*", pending: "o", skipped: ">", stopped: "_",
	rule: "-", heavy: "=", bar: "#", rest: ".", cursor: ">", ellipsis: "~", dot: ".", branch: "`",
	tee: "|", arrow: ">", to: "->", up: "^",
	cornerTL: "+", cornerTR: "+", cornerBL: "+", cornerBR: "+", side: "|",
	spinner: []string{"|", "/", "-", `\`},
}

// newTheme returns the theme of a terminal. With 16 colours it uses the terminal's palette,
// which the user has chosen to be legible. With more colours it uses fixed values that are
// legible on a light or a dark background.
func newTheme(l display) *theme {
	t := &theme{display: l, signs: unicodeSigns}
	if l.ascii {
		t.signs = asciiSigns
	}
	if l.colours == noColours {
		return t
	}
	r := lipgloss.NewRenderer(io.Discard)
	r.SetHasDarkBackground(!l.light)
	r.SetColorProfile(map[colours]termenv.Profile{
		colours16: termenv.ANSI, colours256: termenv.ANSI256, trueColour: termenv.TrueColor,
	}[l.colours])
	pick := func(light, dark, ansiLight, ansiDark string) lipgloss.TerminalColor {
		if l.colours == colours16 {
			return lipgloss.AdaptiveColor{Light: ansiLight, Dark: ansiDark}
		}
		return lipgloss.AdaptiveColor{Light: light, Dark: dark}
	}
	s := r.NewStyle()
	for role, st := range map[style]lipgloss.Style{
		strong:  s.Bold(true),
		faint:   s.Foreground(pick("#626262", "#9e9e9e", "8", "7")).Faint(l.colours == colours16),
		good:    s.Foreground(pick("#1a7f37", "#4ec96f", "2", "2")),
		caution: s.Foreground(pick("#8a5a00", "#e3b341", "3", "3")),
		bad:     s.Foreground(pick("#b3261e", "#ff7b72", "1", "1")).Bold(true),
		accent:  s.Foreground(pick("#0550ae", "#79c0ff", "4", "6")),
		chosen:  s.Reverse(true),
	} {
		t.before[role], t.after[role], _ = strings.Cut(st.Render("x"), "x")
	}
	return t
}

// paint returns s in a style.
func (t *theme) paint(st style, s string) string {
	if s == "" || t.before[st] == "" {
		return s
	}
	return t.before[st] + s + t.after[st]
}

// spin returns the n-th frame of the spinner.
func (t *theme) spin(n int) string { return t.spinner[n%len(t.spinner)] }

// row builds one line of the screen, at most max columns wide unless its theme is uncut.
type row struct {
	t        *theme
	b        strings.Builder
	used     int
	max      int
	overflow bool
}

func (t *theme) row(max int) *row { return &row{t: t, max: max} }

// fits reports whether s can be added without a cut.
func (r *row) fits(s string) bool { return r.t.uncut || r.used+width(s) <= r.max }

// below wraps a text into at most most indented lines; the last one ends with an ellipsis if
// text is left.
func (t *theme) below(w, indent, most int, st style, s string) []string {
	parts := wrap(s, max(10, w-indent))
	if t.uncut {
		parts = []string{s}
	}
	var lines []string
	for i, p := range parts[:min(len(parts), most)] {
		if i == most-1 && len(parts) > most {
			p = cut(strings.Join(parts[i:], " "), max(10, w-indent), t.ellipsis)
		}
		lines = append(lines, t.row(w).pad(indent).add(st, p).String())
	}
	return lines
}

// add appends s in a style. If s does not fit, it is cut with an ellipsis, and later additions
// are dropped.
func (r *row) add(st style, s string) *row {
	if r.overflow || s == "" {
		return r
	}
	if r.t.ascii {
		s = asciiOf(s)
	}
	w := width(s)
	if r.used+w > r.max && !r.t.uncut {
		s = cut(s, r.max-r.used, r.t.ellipsis)
		w = width(s)
		r.overflow = true
	}
	r.b.WriteString(r.t.paint(st, s))
	r.used += w
	return r
}

// raw appends s in a style. All characters of s must be one column wide and supported by the terminal.
func (r *row) raw(st style, s string) *row {
	if n := utf8.RuneCountInString(s); n > 0 && (r.t.uncut || r.used+n <= r.max) {
		r.b.WriteString(r.t.paint(st, s))
		r.used += n
	}
	return r
}

// col appends s, cut or padded to w columns, and one space.
func (r *row) col(st style, s string, w int) *row {
	if r.t.ascii {
		s = asciiOf(s)
	}
	if !r.t.uncut {
		s = cut(s, w, r.t.ellipsis)
	}
	return r.add(st, s).pad(max(1, w-width(s)+1))
}

// num appends s, right-aligned in w columns, and one space.
func (r *row) num(st style, s string, w int) *row {
	s = cut(s, w, r.t.ellipsis)
	return r.pad(w-width(s)).add(st, s).pad(1)
}

// pad appends n spaces.
func (r *row) pad(n int) *row {
	if !r.t.uncut {
		n = min(n, r.max-r.used)
	}
	if n > 0 {
		r.b.WriteString(strings.Repeat(" ", n))
		r.used += n
	}
	return r
}

// to pads up to column n.
func (r *row) to(n int) *row { return r.pad(n - r.used) }

// right puts s at the right end of the line, one space from the edge, if it fits.
func (r *row) right(st style, s string) *row {
	if r.t.ascii {
		s = asciiOf(s)
	}
	w := width(s)
	if s == "" || r.used+w+2 > r.max {
		if s != "" && r.t.uncut {
			return r.pad(2).add(st, s)
		}
		return r
	}
	return r.pad(r.max-r.used-w-1).add(st, s)
}

func (r *row) String() string { return r.b.String() }

// rule draws a horizontal line with a title and, at its right end, a remark.
func (t *theme) rule(w int, title, remark string) string {
	if t.ascii {
		title, remark = asciiOf(title), asciiOf(remark)
	}
	r := t.row(w).add(faint, t.signs.rule)
	if title != "" {
		r.add(plain, " ").add(strong, title).add(plain, " ")
	}
	tail := 0
	if remark != "" && r.used+width(remark)+4 <= w {
		tail = width(remark) + 3
	}
	if n := w - r.used - tail; n > 0 {
		r.add(faint, strings.Repeat(t.signs.rule, n))
	}
	if tail > 0 {
		r.add(plain, " ").add(faint, remark).add(plain, " ").add(faint, t.signs.rule)
	}
	return r.String()
}

// meter draws a progress bar w columns wide.
func (t *theme) meter(done, total int64, w int) string {
	if total <= 0 || w < 3 {
		return ""
	}
	n := int(min(done, total) * int64(w) / total)
	return strings.Repeat(t.bar, n) + strings.Repeat(t.rest, w-n)
}
