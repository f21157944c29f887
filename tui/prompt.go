package tui

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"constellation/tui/term"
)

// prompt asks the user questions, one line each, without the console.
type prompt struct {
	in  io.Reader
	out io.Writer
}

// confirmed prompts for y or yes. No is the default.
func (p prompt) confirmed(question string) bool {
	if f, ok := p.in.(*os.File); ok {
		term.DiscardInput(f)
	}
	fmt.Fprintf(p.out, "%s [y/N] ", question)
	line, err := bufio.NewReader(p.in).ReadString('\n')
	answer := strings.ToLower(strings.TrimSpace(line))
	return err == nil && (answer == "y" || answer == "yes")
}

// typed prints question and reports whether the user typed want.
func (p prompt) typed(question, want string) bool {
	if f, ok := p.in.(*os.File); ok {
		term.DiscardInput(f)
	}
	fmt.Fprint(p.out, question)
	line, err := bufio.NewReader(p.in).ReadString('\n')
	return err == nil && strings.TrimSpace(line) == want
}

// chosen prompts until the user picks an entry of list; ok is false at q or end of input.
func (p prompt) chosen(list []offer) (o offer, ok bool) {
	for {
		fmt.Fprintf(p.out, "Type a number from 1 to %d, or q to quit: ", len(list))
		// A terminal delivers one line per read, so the buffer takes no input of later prompts.
		line, err := bufio.NewReader(p.in).ReadString('\n')
		answer := strings.ToLower(strings.TrimSpace(line))
		if err != nil || answer == "q" {
			return offer{}, false
		}
		if n, err := strconv.Atoi(answer); err == nil && n >= 1 && n <= len(list) {
			return list[n-1], true
		}
	}
}
