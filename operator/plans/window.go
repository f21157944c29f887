package plans

import (
	"errors"
	"fmt"
	"strings"
	"time"
	_ "time/tzdata" // images without a file system have no time zones of their own

	"constellation/operator/api/upgradev1"
)

// window is a daily period on some weekdays, in a time zone. It belongs to the day on which it
// opens, even if it ends on the next day.
type window struct {
	days       [7]bool
	start, end time.Duration // since midnight; end is inclusive
	zone       *time.Location
}

var days = map[upgradev1.Day]time.Weekday{}

func init() {
	for d := time.Sunday; d <= time.Saturday; d++ {
		name := strings.ToLower(d.String())
		for _, alias := range []string{fmt.Sprint(int(d)), name[:2], name[:3], name} {
			days[upgradev1.Day(alias)] = d
		}
	}
}

var clocks = []string{"15:04", "15:04:05", "03:04pm", "15", "03pm", "3pm"}

func parseClock(s string) (time.Duration, error) {
	for _, layout := range clocks {
		if t, err := time.Parse(layout, s); err == nil {
			return time.Duration(t.Hour())*time.Hour + time.Duration(t.Minute())*time.Minute + time.Duration(t.Second())*time.Second, nil
		}
	}
	return 0, fmt.Errorf("%q is not a time such as 22:30 or 10pm", s)
}

// parseWindow parses a window.
func parseWindow(s upgradev1.TimeWindowSpec) (window, error) {
	var w window
	var errs []error
	for _, d := range s.Days {
		day, ok := days[upgradev1.Day(strings.ToLower(string(d)))]
		if !ok {
			errs = append(errs, fmt.Errorf("%q is not a day", d))
			continue
		}
		w.days[day] = true
	}
	var err error
	if w.start, err = parseClock(s.StartTime); err != nil {
		errs = append(errs, err)
	}
	if w.end, err = parseClock(s.EndTime); err != nil {
		errs = append(errs, err)
	}
	if w.zone, err = time.LoadLocation(s.TimeZone); err != nil {
		errs = append(errs, err)
	}
	return w, errors.Join(errs...)
}

// on returns when the window opens and closes on the day of t. ok is false if it does not open on
// that day.
func (w window) on(t time.Time) (opens, closed time.Time, ok bool) {
	y, m, d := t.Date()
	at := func(day int, since time.Duration) time.Time {
		return time.Date(y, m, day, 0, 0, int(since/time.Second), 0, w.zone)
	}
	end := d
	if w.end < w.start {
		end++
	}
	return at(d, w.start), at(end, w.end+time.Second), w.days[t.Weekday()]
}

// open reports whether the window is open at a time, and when that changes next; zero:
// never.
func (w window) open(at time.Time) (is bool, changes time.Time) {
	at = at.In(w.zone)
	for d := -1; d <= 7; d++ {
		y, m, day := at.Date()
		// Noon exists on every day, even if the clock changes at night.
		opens, closed, ok := w.on(time.Date(y, m, day+d, 12, 0, 0, 0, w.zone))
		switch {
		case !ok || !at.Before(closed):
		case at.Before(opens):
			return false, opens
		default:
			return true, closed
		}
	}
	return false, time.Time{}
}
