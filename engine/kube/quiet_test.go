package kube

import (
	"errors"
	"io"
	"os"
	"testing"

	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

// No output of client-go reaches the terminal, whichever logger it uses.
func TestClientGoLogsAreDiscarded(t *testing.T) {
	if _, err := ForConfig(&rest.Config{Host: "https://127.0.0.1:1"}, nil); err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	stderr := os.Stderr
	os.Stderr = w
	defer func() { os.Stderr = stderr }()
	klog.Error("an error")
	klog.Warningf("a %s", "warning")
	klog.ErrorS(errors.New("cause"), "Unexpected error when reading response body")
	klog.Background().Error(errors.New("cause"), "without a logger")
	klog.FromContext(t.Context()).Error(errors.New("cause"), "with the logger of a context")
	utilruntime.HandleErrorWithContext(t.Context(), errors.New("cause"), "Unhandled")
	klog.Flush()
	os.Stderr = stderr
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(r); err != nil || len(b) > 0 {
		t.Errorf("stderr got %q, %v", b, err)
	}
}
