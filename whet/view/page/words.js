// Words of the page: English as they are written in the code, and their Chinese.

import { CHINESE } from "./chinese.js";

let language = "en";

export function setLanguage(name) {
  language = name === "zh" ? "zh" : "en";
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
}

export const languageNow = () => language;

// A text in the chosen language, with {0}, {1} … filled in.
export function t(text, ...given) {
  const words = (language === "zh" ? CHINESE[text] : undefined) ?? String(text ?? "–");
  return words.replace(/\{(\d)\}/g, (_, place) => String(given[place]));
}

// A text of a lesson, which has both languages.
export const both = (words) => (words && typeof words === "object" ? words[language] ?? words.en : words ?? "");
