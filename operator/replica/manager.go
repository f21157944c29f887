package replica

import (
	"cmp"
	"log/slog"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"constellation/operator/liblog"
)

// The API server sheds load by itself; these limits only bound the requests of a bug.
const clientQPS, clientBurst = 500, 1000

// A leader that hangs is replaced after LeaseDuration. A leader that stops is replaced at once.
const (
	LeaseDuration = 15 * time.Second
	RenewDeadline = 10 * time.Second
	RetryPeriod   = 2 * time.Second
)

// Access returns the access of a controller to the API server of cluster.
func Access(cluster *rest.Config, userAgent string) *rest.Config {
	access := rest.CopyConfig(cluster)
	access.QPS, access.Burst = clientQPS, clientBurst
	access.UserAgent = userAgent
	return access
}

// Options returns what managers of controllers have in common: the terms of an election, and the
// addresses of metrics and health checks, of which an empty one has no server. It makes log the
// logger of the framework, which is the process's; so is a controller.
func Options(scheme *runtime.Scheme, log *slog.Logger, metrics, health string) manager.Options {
	libraries := logr.FromSlogHandler(liblog.Handler(log.Handler()))
	ctrl.SetLogger(libraries)
	return manager.Options{
		Scheme: scheme, Logger: libraries,
		LeaderElectionReleaseOnCancel: true,
		LeaseDuration:                 new(LeaseDuration), RenewDeadline: new(RenewDeadline), RetryPeriod: new(RetryPeriod),
		Metrics:                metricsserver.Options{BindAddress: cmp.Or(metrics, "0")}, // "0" disables the server in controller-runtime
		HealthProbeBindAddress: health,
		// Names are for metrics; a process that runs two controllers of a name is a test.
		Controller: config.Controller{SkipNameValidation: new(true)},
	}
}
