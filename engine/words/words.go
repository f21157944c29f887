// Package words answers: how is a number or a list written in an English sentence?
package words

import (
	"strconv"
	"strings"
)

// Or joins words: "a, b or c".
func Or(words []string) string {
	if n := len(words); n > 1 {
		return strings.Join(words[:n-1], ", ") + " or " + words[n-1]
	}
	return strings.Join(words, "")
}

// And joins words: "a, b and c".
func And(words []string) string { return Enumerate(words, " and ") }

// Enumerate joins words with commas, and the last two with last; "nothing" if there are none.
func Enumerate(words []string, last string) string {
	switch n := len(words); n {
	case 0:
		return "nothing"
	case 1:
		return words[0]
	default:
		return strings.Join(words[:n-1], ", ") + last + words[n-1]
	}
}

// Count writes n with its noun: "1 node", "3 nodes".
func Count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return strconv.Itoa(n) + " " + noun + "s"
}

// Verb is a verb for n of something: "1 value changes", "3 values change".
func Verb(n int, plural string) string {
	if n == 1 {
		return plural + "s"
	}
	return plural
}
