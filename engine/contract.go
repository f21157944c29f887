package engine

import (
	"context"
	"errors"
	"log/slog"
	"time"
)

// Being built: the signatures that the console is written against.

var errPending = errors.New("not built yet")

type Reporter struct{}

func (r *Reporter) Progress(current, total int64, text string) {}

type Cluster interface{}
type Provider interface{}

type Deps struct {
	Connect  func(ctx context.Context, kubeconfig []byte) (Cluster, error)
	Sandbox  Sandbox
	Provider func(ctx context.Context, c *Config, s *State) (Provider, error)
	Log      *slog.Logger
	Now      func() time.Time
}

type Engine struct{}

func New(w *Workspace, d Deps) *Engine                   { return &Engine{} }
func (e *Engine) Home(ctx context.Context) (Home, error) { return Home{}, errPending }
func (e *Engine) Preflight(ctx context.Context, emit func(Event)) ([]Finding, error) {
	return nil, errPending
}
func (e *Engine) PlanInit(ctx context.Context) (*Plan, error) { return nil, errPending }

// Run serialises emit: it is never called concurrently, and in the order of Seq.
func (e *Engine) Run(ctx context.Context, p *Plan, emit func(Event)) error { return errPending }
func (e *Engine) Status(ctx context.Context) (Status, error)               { return Status{}, errPending }
func (e *Engine) Runs() ([]RunSummary, error)                              { return nil, errPending }
