package console

import (
	"context"
	"errors"
	"strings"
	"unicode/utf8"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/tui/term"
)

// Ask asks the user for a secret. It returns an error if the user gives none, or when ctx ends.
type Ask func(ctx context.Context, question string) ([]byte, error)

// secretPrompt asks for a secret that a background task needs, and masks it.
type secretPrompt struct {
	c        *console
	question string
	text     []byte
	reply    chan []byte // nil while it asks nothing
}

type (
	// secretWanted opens the prompt. reply gets the secret, or nil if the user gives none.
	secretWanted struct {
		question string
		reply    chan []byte
	}
	// secretGone closes the prompt of a task that has ended.
	secretGone struct{ reply chan []byte }
)

// ask is an Ask. It is called in background tasks.
func (p *secretPrompt) ask(ctx context.Context, question string) ([]byte, error) {
	reply := make(chan []byte, 1)
	p.c.deps.send(secretWanted{question, reply})
	select {
	case b := <-reply:
		if b == nil {
			return nil, errors.New("the prompt was not answered")
		}
		return b, nil
	case <-ctx.Done():
		p.c.deps.send(secretGone{reply})
		return nil, context.Cause(ctx)
	}
}

func (p *secretPrompt) open() bool { return p.reply != nil }

func (p *secretPrompt) take(msg tea.Msg) bool {
	switch msg := msg.(type) {
	case secretWanted:
		p.close(nil)
		p.c.help.open, p.c.pal = false, palette{} // keys go to the prompt
		p.question, p.reply = term.Clean(msg.question), msg.reply
	case secretGone:
		if p.reply == msg.reply {
			p.close(nil)
		}
	default:
		return false
	}
	return true
}

// close ends the prompt with an answer.
func (p *secretPrompt) close(answer []byte) {
	if p.reply != nil {
		p.reply <- answer
	}
	p.reply, p.text = nil, nil
}

func (p *secretPrompt) keys() []binding {
	return []binding{
		on("enter", "Enter", "use the secret", "secret", act(func() { p.close(append([]byte{}, p.text...)) })).footed("use it"),
		on("esc", "Esc", "give no secret", "back", act(func() { p.close(nil) })).footed("give none"),
		on("ctrl+c", "Ctrl-C", "leave", "leave", func() tea.Cmd { p.close(nil); return p.c.quit.leave() }),
	}
}

// typed handles a key of the secret. It reports false for keys that have a binding.
func (p *secretPrompt) typed(k tea.KeyMsg) bool {
	switch k.Type {
	case tea.KeyEnter, tea.KeyEsc:
		return false
	case tea.KeyBackspace:
		_, n := utf8.DecodeLastRune(p.text)
		p.text = p.text[:len(p.text)-n]
	case tea.KeyCtrlU:
		p.text = nil
	case tea.KeyRunes, tea.KeySpace:
		p.text = append(p.text, string(k.Runes)...)
	}
	return true
}

// prompt replaces the lines above the key line.
func (p *secretPrompt) prompt() []string {
	mask := "•"
	if p.c.th.Ascii {
		mask = "*"
	}
	lines := p.c.th.Below(p.c.w, 1, 2, term.Caution, p.question+":")
	return append(lines, p.c.th.Row(p.c.w).Pad(1).Add(term.Plain, strings.Repeat(mask, utf8.RuneCount(p.text))+term.AsciiIf(p.c.th.Ascii, "▏")).String())
}
