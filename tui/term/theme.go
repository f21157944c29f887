package term

import (
	"io"
	"strings"
	"unicode/utf8"

	"github.com/charmbracelet/lipgloss"
	"github.com/muesli/termenv"
)

// Style is a role of text on the screen. A state never shows by its style alone: a sign or
// a word always repeats it.
type Style int

// The styles.
const (
	Plain Style = iota
	Strong
	Faint
	Good
	Caution
	Bad
	Accent
	Chosen // the row under the cursor
	styles
)

// colours is the colour depth of a terminal.
type colours int

// The colour depths.
const (
	NoColours colours = iota
	Colours16
	Colours256
	TrueColour
)

// Display are the capabilities of a terminal that rendering depends on. The same value renders
// the same frame.
type Display struct {
	Colours colours
	Light   bool // the terminal's background is light
	Ascii   bool // the locale is not UTF-8
}

// Theme holds, for the capabilities of a terminal, the escape sequences before and after text
// of each style, and the signs.
type Theme struct {
	Display
	before, after [styles]string
	Signs
	// Uncut lets rows exceed their width: for print.
	Uncut bool
}

// Printed is the theme for lines that stay on the terminal or in a file, where long lines do
// no harm.
func (t *Theme) Printed() *Theme {
	p := *t
	p.Uncut = true
	return &p
}

// Signs are the symbols of the screen.
type Signs struct {
	Brand, OK, Warn, Fail, Running, Pending, Skipped, Stopped string
	Rule, Heavy, Bar, rest, Cursor, Ellipsis, Dot, Branch     string
	Tee, Arrow, To, Up                                        string
	CornerTL, CornerTR, CornerBL, CornerBR, Side              string
	spinner                                                   []string
}

var unicodeSigns = Signs{
	Brand: "◉", OK: "✓", Warn: "!", Fail: "✗", Running: "●", Pending: "○", Skipped: "↷", Stopped: "◌",
	Rule: "─", Heavy: "━", Bar: "█", rest: "░", Cursor: "▸", Ellipsis: "…", Dot: "·", Branch: "└",
	Tee: "├", Arrow: "▶", To: "→", Up: "▲",
	CornerTL: "╭", CornerTR: "╮", CornerBL: "╰", CornerBR: "╯", Side: "│",
	spinner: []string{"⠋", "⠙", "⠹", "⠸", "⠼", "⠴", "⠦", "⠧", "⠇", "⠏"},
}

var asciiSigns = Signs{
	Brand: "@", OK: "+", Warn: "!", Fail: "x", Running: "*", Pending: "o", Skipped: ">", Stopped: "_",
	Rule: "-", Heavy: "=", Bar: "#", rest: ".", Cursor: ">", Ellipsis: "~", Dot: ".", Branch: "`",
	Tee: "|", Arrow: ">", To: "->", Up: "^",
	CornerTL: "+", CornerTR: "+", CornerBL: "+", CornerBR: "+", Side: "|",
	spinner: []string{"|", "/", "-", `\`},
}

// NewTheme returns the theme of a terminal. With 16 colours it uses the terminal's palette,
// which the user has chosen to be legible. With more colours it uses fixed values that are
// legible on a light or a dark background.
func NewTheme(l Display) *Theme {
	t := &Theme{Display: l, Signs: unicodeSigns}
	if l.Ascii {
		t.Signs = asciiSigns
	}
	if l.Colours == NoColours {
		return t
	}
	r := lipgloss.NewRenderer(io.Discard)
	r.SetHasDarkBackground(!l.Light)
	r.SetColorProfile(map[colours]termenv.Profile{
		Colours16: termenv.ANSI, Colours256: termenv.ANSI256, TrueColour: termenv.TrueColor,
	}[l.Colours])
	pick := func(light, dark, ansiLight, ansiDark string) lipgloss.TerminalColor {
		if l.Colours == Colours16 {
			return lipgloss.AdaptiveColor{Light: ansiLight, Dark: ansiDark}
		}
		return lipgloss.AdaptiveColor{Light: light, Dark: dark}
	}
	s := r.NewStyle()
	for role, st := range map[Style]lipgloss.Style{
		Strong:  s.Bold(true),
		Faint:   s.Foreground(pick("#626262", "#9e9e9e", "8", "7")).Faint(l.Colours == Colours16),
		Good:    s.Foreground(pick("#1a7f37", "#4ec96f", "2", "2")),
		Caution: s.Foreground(pick("#8a5a00", "#e3b341", "3", "3")),
		Bad:     s.Foreground(pick("#b3261e", "#ff7b72", "1", "1")).Bold(true),
		Accent:  s.Foreground(pick("#0550ae", "#79c0ff", "4", "6")),
		Chosen:  s.Reverse(true),
	} {
		t.before[role], t.after[role], _ = strings.Cut(st.Render("x"), "x")
	}
	return t
}

// Paint returns s in a style.
func (t *Theme) Paint(st Style, s string) string {
	if s == "" || t.before[st] == "" {
		return s
	}
	return t.before[st] + s + t.after[st]
}

// Spin returns the n-th frame of the spinner.
func (t *Theme) Spin(n int) string { return t.spinner[n%len(t.spinner)] }

// Row builds one line of the screen, at most max columns wide unless its theme is uncut.
type Row struct {
	t        *Theme
	b        strings.Builder
	Used     int
	max      int
	overflow bool
}

// Row begins a line of at most max columns.
func (t *Theme) Row(max int) *Row { return &Row{t: t, max: max} }

// Fits reports whether s can be added without a cut.
func (r *Row) Fits(s string) bool { return r.t.Uncut || r.Used+Width(s) <= r.max }

// Below wraps a text into at most most indented lines; the last one ends with an ellipsis if
// text is left.
func (t *Theme) Below(w, indent, most int, st Style, s string) []string {
	parts := Wrap(s, max(10, w-indent))
	if t.Uncut {
		parts = []string{s}
	}
	var lines []string
	for i, p := range parts[:min(len(parts), most)] {
		if i == most-1 && len(parts) > most {
			p = Cut(strings.Join(parts[i:], " "), max(10, w-indent), t.Ellipsis)
		}
		lines = append(lines, t.Row(w).Pad(indent).Add(st, p).String())
	}
	return lines
}

// Add appends s in a style. If s does not fit, it is cut with an ellipsis, and later additions
// are dropped.
func (r *Row) Add(st Style, s string) *Row {
	if r.overflow || s == "" {
		return r
	}
	if r.t.Ascii {
		s = asciiOf(s)
	}
	w := Width(s)
	if r.Used+w > r.max && !r.t.Uncut {
		s = Cut(s, r.max-r.Used, r.t.Ellipsis)
		w = Width(s)
		r.overflow = true
	}
	r.b.WriteString(r.t.Paint(st, s))
	r.Used += w
	return r
}

// Raw appends s in a style. All characters of s must be one column wide and supported by the terminal.
func (r *Row) Raw(st Style, s string) *Row {
	if n := utf8.RuneCountInString(s); n > 0 && (r.t.Uncut || r.Used+n <= r.max) {
		r.b.WriteString(r.t.Paint(st, s))
		r.Used += n
	}
	return r
}

// Col appends s, cut or padded to w columns, and one space.
func (r *Row) Col(st Style, s string, w int) *Row {
	if r.t.Ascii {
		s = asciiOf(s)
	}
	if !r.t.Uncut {
		s = Cut(s, w, r.t.Ellipsis)
	}
	return r.Add(st, s).Pad(max(1, w-Width(s)+1))
}

// Num appends s, right-aligned in w columns, and one space.
func (r *Row) Num(st Style, s string, w int) *Row {
	s = Cut(s, w, r.t.Ellipsis)
	return r.Pad(w-Width(s)).Add(st, s).Pad(1)
}

// Pad appends n spaces.
func (r *Row) Pad(n int) *Row {
	if !r.t.Uncut {
		n = min(n, r.max-r.Used)
	}
	if n > 0 {
		r.b.WriteString(strings.Repeat(" ", n))
		r.Used += n
	}
	return r
}

// To pads up to column n.
func (r *Row) To(n int) *Row { return r.Pad(n - r.Used) }

// Right puts s at the right end of the line, one space from the edge, if it fits.
func (r *Row) Right(st Style, s string) *Row {
	if r.t.Ascii {
		s = asciiOf(s)
	}
	w := Width(s)
	if s == "" || r.Used+w+2 > r.max {
		if s != "" && r.t.Uncut {
			return r.Pad(2).Add(st, s)
		}
		return r
	}
	return r.Pad(r.max-r.Used-w-1).Add(st, s)
}

// Hang appends a text, wrapped. Its further lines begin below its first column. The row is not used afterwards.
func (r *Row) Hang(st Style, s string) (lines []string) {
	indent := r.Used
	for i, p := range Wrap(s, max(20, r.max-indent)) {
		if i > 0 {
			r = r.t.Row(r.max).Pad(indent)
		}
		lines = append(lines, r.Add(st, p).String())
	}
	return lines
}

func (r *Row) String() string { return r.b.String() }

// Rule draws a horizontal line with a title and, at its right end, a remark.
func (t *Theme) Rule(w int, title, remark string) string {
	if t.Ascii {
		title, remark = asciiOf(title), asciiOf(remark)
	}
	r := t.Row(w).Add(Faint, t.Signs.Rule)
	if title != "" {
		r.Add(Plain, " ").Add(Strong, title).Add(Plain, " ")
	}
	tail := 0
	if remark != "" && r.Used+Width(remark)+4 <= w {
		tail = Width(remark) + 3
	}
	if n := w - r.Used - tail; n > 0 {
		r.Add(Faint, strings.Repeat(t.Signs.Rule, n))
	}
	if tail > 0 {
		r.Add(Plain, " ").Add(Faint, remark).Add(Plain, " ").Add(Faint, t.Signs.Rule)
	}
	return r.String()
}

// Meter draws a progress bar w columns wide.
func (t *Theme) Meter(done, total int64, w int) string {
	if total <= 0 || w < 3 {
		return ""
	}
	n := int(min(done, total) * int64(w) / total)
	return strings.Repeat(t.Bar, n) + strings.Repeat(t.rest, w-n)
}
