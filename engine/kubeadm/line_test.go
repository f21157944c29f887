package kubeadm

import (
	"log/slog"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

func TestLinesAreFitToBeShown(t *testing.T) {
	for _, tt := range []struct {
		name, raw string
		want      Line
	}{
		{name: "a phase", raw: "[kubelet-start] Starting the kubelet", want: Line{slog.LevelInfo, "kubelet-start", "Starting the kubelet"}},
		{name: "colours and titles", raw: "\x1b]0;title\x07\x1b[31;1m[certs]\x1b[0m red", want: Line{slog.LevelInfo, "certs", "red"}},
		{name: "an unfinished title swallows nothing that matters", raw: "a\x1b]0;title", want: Line{slog.LevelInfo, "", "a"}},
		{name: "control and direction characters", raw: "a\x00b\x08c\u202ed\u200be\tf", want: Line{slog.LevelInfo, "", "abcde f"}},
		{name: "invalid text", raw: "a\xff\xfeb", want: Line{slog.LevelInfo, "", "ab"}},
		{name: "a warning of klog", raw: "W1121 08:00:00.123456    4711 version.go:108] could not fetch", want: Line{slog.LevelWarn, "", "could not fetch"}},
		{name: "an error of klog", raw: "E1121 08:00:00.123456 1 a.go:1] [init] broken", want: Line{slog.LevelError, "init", "broken"}},
		{name: "an error of kubeadm", raw: "error execution phase wait-control-plane: timed out", want: Line{slog.LevelError, "", "error execution phase wait-control-plane: timed out"}},
		{name: "a preflight error", raw: "\t[ERROR Port-10250]: Port 10250 is in use", want: Line{slog.LevelError, "", "[ERROR Port-10250]: Port 10250 is in use"}},
		{name: "a token", raw: `[bootstrap-token] Using token: abcdef.0123456789abcdef`, want: Line{slog.LevelInfo, "bootstrap-token", "Using token: [redacted]"}},
		{name: "a token split by colours", raw: "token abc\x1b[1mdef.0123456789abcdef", want: Line{slog.LevelInfo, "", "token [redacted]"}},
		{name: "a certificate key", raw: "certificateKey: " + strings.Repeat("0f", 32), want: Line{slog.LevelInfo, "", "certificateKey: [redacted]"}},
		{name: "a hash is no secret", raw: "sha256:" + strings.Repeat("0f", 32), want: Line{slog.LevelInfo, "", "sha256:" + strings.Repeat("0f", 32)}},
		{name: "a name with a dot is none either", raw: "kubelet.service is active", want: Line{slog.LevelInfo, "", "kubelet.service is active"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := parseLine(tt.raw, nil); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func FuzzParseLine(f *testing.F) {
	f.Add("\x1b[1m[certs]\x1b[0m x")
	f.Add("token abcdef.0123456789abcdef")
	f.Add("\x1b]0;\x1b\\abc")
	f.Fuzz(func(t *testing.T, raw string) {
		l := parseLine("x"+raw+" s3cr3t-value "+raw, []string{"s3cr3t-value"})
		for _, s := range []string{l.Text, l.Phase} {
			if !utf8.ValidString(s) || len(s) > maxLine+3 {
				t.Errorf("%q", s)
			}
			for _, r := range s {
				if unicode.IsControl(r) {
					t.Errorf("control character %q in %q", r, s)
				}
			}
			if strings.Contains(s, "s3cr3t-value") || tokenRE.MatchString(s) {
				t.Errorf("secret in %q", s)
			}
		}
	})
}
