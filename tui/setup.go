package tui

import (
	"context"

	"constellation/engine/cloud/providers"
	"constellation/engine/workspace"
	"constellation/tui/console"
)

// consoleSetup is how a console writes the configuration of a workspace that has none.
func consoleSetup(s *session, eng Engine, ws *workspace.Workspace, dir string) *console.Setup {
	return &console.Setup{
		Find: func(name string) (f providers.Found) {
			if p, ok := providers.Named(name); ok && p.Find != nil {
				f = p.Find()
			}
			return f
		},
		Write: func(name string, o workspace.GenerateOptions) (string, *console.Machines, error) {
			if p, ok := providers.Named(name); ok && p.Sandbox != nil {
				if found := s.findSandbox(context.Background(), dir); found != nil && found.Provider() == name {
					o.Sandbox = found
				}
			}
			b, err := workspace.GenerateConfig(name, o)
			if err != nil {
				return "", nil, err
			}
			path, err := ws.WriteConfig(b)
			if err != nil {
				return "", nil, err
			}
			return path, consoleMachines(s, eng, ws), nil
		},
	}
}
