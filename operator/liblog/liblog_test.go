package liblog

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// refused returns a client's error for an address without a listener.
func refused(t *testing.T) error {
	t.Helper()
	s := httptest.NewServer(http.NotFoundHandler())
	s.Close()
	resp, err := http.Get(s.URL)
	if err == nil {
		resp.Body.Close()
		t.Fatal("a closed server responds")
	}
	return err
}

func TestUnreachableServerErrors(t *testing.T) {
	for name, tt := range map[string]struct {
		err  error
		want bool
	}{
		"no error":                      {nil, false},
		"no listener":                   {fmt.Errorf("failed to list *v1.Node: %w", refused(t)), true},
		"timeout":                       {&url.Error{Op: "Get", URL: "https://10.0.0.1", Err: context.DeadlineExceeded}, true},
		"no route":                      {&net.OpError{Op: "dial", Err: &net.DNSError{IsTimeout: true}}, true},
		"API server is starting":        {apierrors.NewServiceUnavailable("starting"), true},
		"forbidden":                     {apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "", errors.New("no")), false},
		"unknown certificate authority": {&url.Error{Op: "Get", URL: "https://10.0.0.1", Err: x509.HostnameError{Certificate: &x509.Certificate{}, Host: "kubernetes"}}, false},
		"unknown error":                 {errors.New("invalid memory address"), false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := away(tt.err); got != tt.want {
				t.Errorf("away(%v) = %v, want %v", tt.err, got, tt.want)
			}
		})
	}
}

// Messages of client-go pass through logr, as in the program.
func TestUnreachableAPIServerIsLoggedOnce(t *testing.T) {
	for _, tt := range []struct {
		level slog.Level
		want  string
	}{
		{slog.LevelInfo, `
WARN API server not reachable, will retry
ERROR Failed to watch: nodes is forbidden: no
WARN API server not reachable, will retry
`},
		{slog.LevelDebug, `
DEBUG starting
WARN API server not reachable, will retry
DEBUG Error retrieving lease lock
ERROR Failed to watch: nodes is forbidden: no
WARN API server not reachable, will retry
`},
	} {
		var out bytes.Buffer
		now := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
		text := slog.NewTextHandler(&out, &slog.HandlerOptions{Level: tt.level})
		log := logr.FromSlogHandler(&handler{Handler: text, said: &said{now: func() time.Time { return now }}})
		gone := refused(t)
		log.Info("starting")
		log.WithName("reflector").WithValues("type", "Node").Error(fmt.Errorf("failed to list: %w", gone), "Failed to watch")
		now = now.Add(again - time.Second)
		log.Error(gone, "Error retrieving lease lock")
		log.Error(apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "", errors.New("no")), "Failed to watch")
		now = now.Add(time.Second)
		log.Error(gone, "Error retrieving lease lock")
		got := "\n"
		for line := range strings.Lines(out.String()) {
			_, line, _ = strings.Cut(line, "level=")
			level, line, _ := strings.Cut(line, " msg=")
			line = strings.TrimPrefix(line, `"`)
			text, rest, _ := strings.Cut(line, `"`)
			text, _, _ = strings.Cut(text, " logger")
			if strings.Contains(rest, "forbidden") {
				text += ": nodes is forbidden: no"
			}
			got += level + " " + strings.TrimSpace(text) + "\n"
		}
		if got != tt.want {
			t.Errorf("at %v: got %swant %s%s", tt.level, got, tt.want, out.String())
		}
	}
}
