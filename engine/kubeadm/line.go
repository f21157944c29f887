package kubeadm

import (
	"bytes"
	"log/slog"
	"regexp"
	"strings"
	"unicode/utf8"

	"constellation/engine/plain"
)

// maxLine is in bytes; kubeadm's longest lines are lists of directories.
const maxLine = 4096

// Line is one line of what kubeadm says, fit to be shown: no control characters,
// no secrets, at most 4 kB.
type Line struct {
	Level slog.Level
	// Phase is what kubeadm puts in brackets, such as "certs"; often empty.
	Phase string
	// Text is the line without phase and log prefix.
	Text string
}

// AddonsSkipped reports whether kubeadm says that it leaves the add-ons alone because a control plane
// runs another version. The control plane may be one that was removed: its mirror pod exists until
// the garbage collection of pods. kubeadm's exit code is zero then.
func (l Line) AddonsSkipped() bool {
	return strings.Contains(l.Text, "Skipping upgrade of addons because control plane instances")
}

var (
	// escapes of terminals: CSI, OSC, and two-character ones.
	escapeRE = regexp.MustCompile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|\\][^\x07\x1b]*(?:\x07|\x1b\\\\)?|[@-Z\\\\^_])")
	klogRE   = regexp.MustCompile(`^([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+\s+\d+ [^\]\s]+\] `)
	phaseRE  = regexp.MustCompile(`^\[([a-z][a-z0-9-]*)\] `)
	// The format of a token or a certificate key, anywhere in a line.
	secretRE = regexp.MustCompile(`\b[a-z0-9]{6}\.[a-z0-9]{16}\b|(?i:(certificate[- ]?key[ =:"']+))[0-9a-f]{64}`)
)

// parseLine turns raw output into a Line. secrets are taken out beside what looks
// like one.
func parseLine(raw string, secrets []string) Line {
	s := escapeRE.ReplaceAllString(raw, "")
	var shown plain.Filter
	s = strings.Map(func(r rune) rune {
		if r == '\t' {
			r = ' '
		}
		if r == utf8.RuneError || !shown.Shows(r) {
			return -1
		}
		return r
	}, s)
	s = redact(s, secrets)
	if len(s) > maxLine {
		s = strings.ToValidUTF8(s[:maxLine], "") + "..."
	}
	l := Line{Level: slog.LevelInfo}
	if m := klogRE.FindStringSubmatch(s); m != nil {
		s = s[len(m[0]):]
		switch m[1] {
		case "I":
			l.Level = slog.LevelDebug
		case "W":
			l.Level = slog.LevelWarn
		default:
			l.Level = slog.LevelError
		}
	}
	if m := phaseRE.FindStringSubmatch(s); m != nil {
		l.Phase, s = m[1], s[len(m[0]):]
	}
	l.Text = strings.TrimSpace(s)
	switch {
	case strings.HasPrefix(l.Text, "[WARNING"):
		l.Level = slog.LevelWarn
	case strings.HasPrefix(l.Text, "[ERROR"), strings.HasPrefix(strings.ToLower(l.Text), "error"):
		l.Level = slog.LevelError
	}
	return l
}

// redact takes secrets and what looks like them out of s.
func redact(s string, secrets []string) string {
	for _, secret := range secrets {
		if secret != "" {
			s = strings.ReplaceAll(s, secret, "[redacted]")
		}
	}
	return secretRE.ReplaceAllString(s, "${1}[redacted]")
}

// lineWriter cuts what is written to it into lines.
type lineWriter struct {
	emit func(raw string)
	buf  []byte
	skip bool // the rest of an overlong line
}

func (w *lineWriter) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		i := bytes.IndexAny(p, "\n\r") // a carriage return redraws the line
		if i < 0 {
			w.add(p)
			break
		}
		w.add(p[:i])
		w.flush()
		p = p[i+1:]
	}
	return n, nil
}

func (w *lineWriter) add(p []byte) {
	if w.skip {
		return
	}
	w.buf = append(w.buf, p...)
	// Memory is bounded whatever a program prints; escapes make lines longer
	// than what is left of them.
	if len(w.buf) > 16*maxLine {
		w.buf, w.skip = w.buf[:16*maxLine], true
	}
}

func (w *lineWriter) flush() {
	if len(bytes.TrimSpace(w.buf)) > 0 {
		w.emit(string(w.buf))
	}
	w.buf, w.skip = w.buf[:0], false
}
