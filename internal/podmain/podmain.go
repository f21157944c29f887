// Package podmain has what the main functions of pods share: access to the cluster and the format of logs.
package podmain

import (
	"log/slog"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Access returns the access of a kubeconfig, or that of the pod's service account if kubeconfig is empty.
func Access(kubeconfig string) (*rest.Config, error) {
	if kubeconfig == "" {
		return rest.InClusterConfig()
	}
	return clientcmd.BuildConfigFromFlags("", kubeconfig)
}

// Readable formats durations with units, not as nanoseconds. It is a slog.HandlerOptions.ReplaceAttr.
func Readable(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration {
		a.Value = slog.StringValue(a.Value.Duration().String())
	}
	return a
}
