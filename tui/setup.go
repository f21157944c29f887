package tui

import (
	"constellation/engine/cloud/providers"
	"constellation/engine/workspace"
	"constellation/tui/console"
)

// consoleSetup is how a console writes the configuration of a workspace that has none.
func consoleSetup(s *session, eng Engine, ws *workspace.Workspace) *console.Setup {
	return &console.Setup{
		Find: func(name string) (f providers.Found) {
			if p, ok := providers.Named(name); ok && p.Find != nil {
				f = p.Find()
			}
			return f
		},
		Write: func(name string, o workspace.GenerateOptions) (string, *console.Machines, error) {
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
