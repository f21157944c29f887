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
		{"a phase", "[kubelet-start] Starting the kubelet", Line{slog.LevelInfo, "kubelet-start", "Starting the kubelet"}},
		{"colours and titles", "\x1b]0;title\x07\x1b[31;1m[certs]\x1b[0m red", Line{slog.LevelInfo, "certs", "red"}},
		{"an unfinished title swallows nothing that matters", "a\x1b]0;title", Line{slog.LevelInfo, "", "a"}},
		{"control and direction characters", "a\x00b\x08c\u202ed\u200be\tf", Line{slog.LevelInfo, "", "abcde f"}},
		{"invalid text", "a\xff\xfeb", Line{slog.LevelInfo, "", "ab"}},
		{"a warning of klog", "W1121 08:00:00.123456    4711 version.go:108] could not fetch", Line{slog.LevelWarn, "", "could not fetch"}},
		{"an error of klog", "E1121 08:00:00.123456 1 a.go:1] [init] broken", Line{slog.LevelError, "init", "broken"}},
		{"an error of kubeadm", "error execution phase wait-control-plane: timed out", Line{slog.LevelError, "", "error execution phase wait-control-plane: timed out"}},
		{"a preflight error", "\t[ERROR Port-10250]: Port 10250 is in use", Line{slog.LevelError, "", "[ERROR Port-10250]: Port 10250 is in use"}},
		{"a token", `[bootstrap-token] Using token: abcdef.0123456789abcdef`, Line{slog.LevelInfo, "bootstrap-token", "Using token: [redacted]"}},
		{"a token split by colours", "token abc\x1b[1mdef.0123456789abcdef", Line{slog.LevelInfo, "", "token [redacted]"}},
		{"a certificate key", "certificateKey: " + strings.Repeat("0f", 32), Line{slog.LevelInfo, "", "certificateKey: [redacted]"}},
		{"a hash is no secret", "sha256:" + strings.Repeat("0f", 32), Line{slog.LevelInfo, "", "sha256:" + strings.Repeat("0f", 32)}},
		{"a name with a dot is none either", "kubelet.service is active", Line{slog.LevelInfo, "", "kubelet.service is active"}},
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
