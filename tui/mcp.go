package tui

import (
	"context"
	"io"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// MCPRequest describes a server for assistants.
type MCPRequest struct {
	// Workspace is the workspace to read. If it is nil, Selected is the cluster.
	Workspace *workspace.Workspace
	Selected  cluster.Selected
	// Timeout bounds each request to a cluster without a workspace; zero sets no limit.
	Timeout time.Duration
	In      io.Reader
	Out     io.Writer
}

func mcpCommand(s *session) *cobra.Command {
	var a cluster.Access
	cmd := &cobra.Command{
		Use:   "mcp",
		Short: "Serve read-only tools to an assistant (MCP)",
		Long: `Serve the tools check, findings, status and history to an assistant, by the Model Context
Protocol on standard input and output. The assistant's program starts this command.

The tools are read-only. Requests that could change a cluster are refused before they are
sent, and so are requests to kubelets. Answers mark text from the cluster as data, and
contain no credentials and no values of Secrets.

In a workspace the server reads the workspace's cluster and its runs. Elsewhere it reads the
cluster that the flags select, as check does, and there is no history. One server reads one
cluster; the assistant cannot select another.

The server ends when its standard input ends.`,
		Example: `  constellation mcp --context prod-eu
  constellation -C demo mcp
  constellation mcp --kubeconfig ~/.kube/staging --as viewer`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return serveMCP(cmd.Context(), s, a) },
	}
	accessFlags(s, cmd, &a)
	return cmd
}

func serveMCP(ctx context.Context, s *session, a cluster.Access) error {
	if err := impersonates(a); err != nil {
		return err
	}
	ws, _, err := s.workspace()
	if err != nil {
		return err
	}
	r := MCPRequest{In: s.Stdin, Out: s.out, Timeout: a.RequestTimeout}
	if ws.Has(workspace.ConfigFile) {
		r.Workspace = ws
		err = ownCluster(s.Clusters, ws, a)
	} else {
		r.Selected, err = s.Clusters.Select(a)
	}
	if err != nil {
		return err
	}
	if s.asks() {
		s.remark("this command speaks a protocol for assistants on standard input; press Ctrl-C to end it")
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	if err := s.ServeMCP(ctx, r); err != nil {
		return &plan.Error{Op: "serve an assistant", Err: err, Remedy: "start the command from the assistant's program"}
	}
	return nil
}
