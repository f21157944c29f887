package cluster

import (
	"context"
	"time"
)

// Access selects a cluster and an identity as the flags of kubectl do.
type Access struct {
	// Kubeconfig is a file; empty means those of the variable KUBECONFIG, or ~/.kube/config.
	Kubeconfig string
	// Context is a context of the kubeconfig; empty means the current one. ClusterName and User
	// override its parts.
	Context, ClusterName, User string
	// As, AsUID and AsGroups impersonate another user.
	As, AsUID string
	AsGroups  []string
	// RequestTimeout bounds one request; zero means no limit beside those of the program.
	RequestTimeout time.Duration
}

// Given reports whether a cluster was selected explicitly.
func (a *Access) Given() bool {
	return a.Kubeconfig != "" || a.Context != "" || a.ClusterName != "" || a.User != ""
}

// Selected is the cluster that an Access selects.
type Selected struct {
	// Context is the name of the context, Server the address of its API server.
	Context, Server string
	// Kubeconfig contains this context alone, with the content of the files that it names.
	Kubeconfig []byte
	// Identity is a digest of the user's credentials: equal ones are of the same user.
	Identity string
	// RequestTimeout is that of the Access.
	RequestTimeout time.Duration
	// Access is what selected the cluster.
	Access Access
	// Note is about another file of KUBECONFIG that has the context for another cluster; empty
	// without one.
	Note string
}

type requestTimeout struct{}

// WithRequestTimeout returns a context in which connections to clusters bound each request.
func WithRequestTimeout(ctx context.Context, limit time.Duration) context.Context {
	return context.WithValue(ctx, requestTimeout{}, limit)
}

// RequestTimeout returns the limit of a context from WithRequestTimeout; zero without one.
func RequestTimeout(ctx context.Context) time.Duration {
	limit, _ := ctx.Value(requestTimeout{}).(time.Duration)
	return limit
}

// Context is a context of a kubeconfig.
type Context struct {
	// Name is the context's name, Server the address of its API server; empty if the kubeconfig
	// does not have it.
	Name, Server string
	// Plugin is the command of its credential plugin; empty without one.
	Plugin string
	// Current is set for the current context.
	Current bool
}

// Contexts are the contexts of a kubeconfig that was read once.
type Contexts struct {
	// List is sorted by name.
	List []Context
	// Select returns the cluster of a context. It sends no request.
	Select func(name string) (Selected, error)
}
