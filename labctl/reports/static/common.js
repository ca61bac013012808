/* Elements, and numbers and times as text as labctl prints them: used by all pages, served or written by labctl report. */
"use strict";
(() => {
  const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

  /* Make an element; attributes and children that are empty are left out. Text becomes text, never HTML. */
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== undefined && value !== null && value !== "") made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== undefined && child !== null && child !== ""));
    return made;
  }

  /* Format with some significant digits, larger numbers as integers. */
  function number(value, digits = 4) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "no value";
    if (Math.abs(value) >= 1e15) return Number(value.toPrecision(digits)).toExponential();
    if (Math.abs(value) >= 10 ** (digits - 1)) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
    const rounded = Number(value.toPrecision(digits));
    if (rounded === 0 || Math.abs(rounded) >= 1e-4) return String(rounded);
    const [mantissa, exponent] = rounded.toExponential().split("e-");
    return `${mantissa}e-${exponent.padStart(2, "0")}`;
  }

  /* Format seconds, below 120 as "4.2 s", else in the two largest units, as "7 min 5 s" or "2 h". */
  function duration(seconds) {
    const whole = Math.round(seconds);
    if (whole < 120) return `${number(seconds, 2)} s`;
    const place = UNITS.findIndex(([, length]) => whole >= length);
    const [[unit, length], [smaller, part]] = [UNITS[place], UNITS[place + 1]];
    const rest = Math.floor((whole % length) / part);
    return `${Math.floor(whole / length)} ${unit}${rest ? ` ${rest} ${smaller}` : ""}`;
  }

  /* Format the seconds since an event in the largest unit, as "42s ago" or "5h ago". */
  function ago(seconds) {
    const whole = Math.max(0, Math.floor(seconds));
    const [unit, length] = UNITS.find(([, length]) => whole >= length) ?? ["s", 1];
    return `${Math.floor(whole / length)}${unit[0]} ago`;
  }

  /* Return "1 run" or "1,200 runs". */
  function count(amount, noun) {
    return `${amount.toLocaleString("en-US")} ${noun}${amount === 1 ? "" : "s"}`;
  }

  window.labctl = { element, number, duration, ago, count };
})();
