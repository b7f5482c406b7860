# ruff: noqa: SIM108, SIM110 - written as a beginner would
"""Right functions, to be broken by `mutations.py`, and the tests of each: expressions that are true.

A model sees the text of a function, so there are no annotations.
"""

from __future__ import annotations

TESTS: dict[str, tuple[str, ...]] = {
    "average": ("average([2, 4, 6]) == 4.0", "average([5]) == 5.0", "average([]) == 0.0", "average([1, 2]) == 1.5"),
    "balanced": (
        "balanced('(())') == True",
        "balanced('())(') == False",
        "balanced('((') == False",
        "balanced('') == True",
        "balanced('a(b)c') == True",
    ),
    "binary_digits": (
        "binary_digits(0) == '0'",
        "binary_digits(1) == '1'",
        "binary_digits(2) == '10'",
        "binary_digits(13) == '1101'",
    ),
    "clamp": ("clamp(5, 1, 10) == 5", "clamp(-3, 1, 10) == 1", "clamp(42, 1, 10) == 10", "clamp(1, 1, 10) == 1"),
    "collatz_steps": (
        "collatz_steps(1) == 0",
        "collatz_steps(2) == 1",
        "collatz_steps(3) == 7",
        "collatz_steps(6) == 8",
    ),
    "common_prefix": (
        "common_prefix('flower', 'flow') == 'flow'",
        "common_prefix('dog', 'car') == ''",
        "common_prefix('abcx', 'abcy') == 'abc'",
        "common_prefix('', 'x') == ''",
    ),
    "count_vowels": (
        "count_vowels('hello') == 2",
        "count_vowels('RHYTHM') == 0",
        "count_vowels('Audio') == 4",
        "count_vowels('') == 0",
    ),
    "digit_sum": ("digit_sum(0) == 0", "digit_sum(7) == 7", "digit_sum(123) == 6", "digit_sum(9990) == 27"),
    "distinct": (
        "distinct([1, 2, 1, 3, 2]) == [1, 2, 3]",
        "distinct([]) == []",
        "distinct([3, 3, 3]) == [3]",
        "distinct([2, 1]) == [2, 1]",
    ),
    "divisors": (
        "divisors(1) == [1]",
        "divisors(6) == [1, 2, 3, 6]",
        "divisors(7) == [1, 7]",
        "divisors(9) == [1, 3, 9]",
    ),
    "factorial": ("factorial(0) == 1", "factorial(1) == 1", "factorial(4) == 24", "factorial(6) == 720"),
    "fibonacci": ("fibonacci(0) == 0", "fibonacci(1) == 1", "fibonacci(2) == 1", "fibonacci(10) == 55"),
    "find": ("find([4, 5, 6], 4) == 0", "find([4, 5, 6], 6) == 2", "find([4, 5], 9) == -1", "find([], 1) == -1"),
    "greatest_divisor": (
        "greatest_divisor(12, 18) == 6",
        "greatest_divisor(7, 3) == 1",
        "greatest_divisor(10, 5) == 5",
        "greatest_divisor(0, 4) == 4",
    ),
    "is_leap_year": (
        "is_leap_year(2024) == True",
        "is_leap_year(2023) == False",
        "is_leap_year(1900) == False",
        "is_leap_year(2000) == True",
    ),
    "is_palindrome": (
        "is_palindrome('level') == True",
        "is_palindrome('ab') == False",
        "is_palindrome('') == True",
        "is_palindrome('abca') == False",
        "is_palindrome('abba') == True",
    ),
    "is_prime": (
        "is_prime(1) == False",
        "is_prime(2) == True",
        "is_prime(4) == False",
        "is_prime(9) == False",
        "is_prime(13) == True",
        "is_prime(15) == False",
    ),
    "is_sorted": (
        "is_sorted([1, 2, 2, 3]) == True",
        "is_sorted([2, 1]) == False",
        "is_sorted([]) == True",
        "is_sorted([1, 3, 2]) == False",
    ),
    "largest": ("largest([3, 9, 2]) == 9", "largest([-5, -2, -9]) == -2", "largest([4]) == 4", "largest([1, 2]) == 2"),
    "letter_counts": (
        "letter_counts('aab') == {'a': 2, 'b': 1}",
        "letter_counts('') == {}",
        "letter_counts('zzz') == {'z': 3}",
        "letter_counts('abc') == {'a': 1, 'b': 1, 'c': 1}",
    ),
    "longest_run": (
        "longest_run([1, 1, 2, 2, 2, 1]) == 3",
        "longest_run([]) == 0",
        "longest_run([7]) == 1",
        "longest_run([1, 2, 3]) == 1",
        "longest_run([5, 5]) == 2",
    ),
    "merge_sorted": (
        "merge_sorted([1, 4], [2, 3]) == [1, 2, 3, 4]",
        "merge_sorted([], [1]) == [1]",
        "merge_sorted([2], []) == [2]",
        "merge_sorted([1, 2], [3]) == [1, 2, 3]",
        "merge_sorted([5, 6], [1]) == [1, 5, 6]",
    ),
    "most_profit": (
        "most_profit([7, 1, 5, 3, 6, 4]) == 5",
        "most_profit([5, 4, 3]) == 0",
        "most_profit([1, 2]) == 1",
        "most_profit([3]) == 0",
    ),
    "power": ("power(2, 0) == 1", "power(2, 10) == 1024", "power(3, 3) == 27", "power(5, 1) == 5"),
    "rotate": (
        "rotate([1, 2, 3, 4], 1) == [4, 1, 2, 3]",
        "rotate([1, 2, 3], 0) == [1, 2, 3]",
        "rotate([1, 2, 3], 4) == [3, 1, 2]",
        "rotate([], 2) == []",
    ),
    "running_total": (
        "running_total([1, 2, 3]) == [1, 3, 6]",
        "running_total([]) == []",
        "running_total([5, -5]) == [5, 0]",
        "running_total([4]) == [4]",
    ),
    "second_largest": (
        "second_largest([1, 5, 3]) == 3",
        "second_largest([2, 2, 1]) == 1",
        "second_largest([4]) == None",
        "second_largest([9, 8, 7]) == 8",
    ),
    "transpose": (
        "transpose([[1, 2], [3, 4]]) == [[1, 3], [2, 4]]",
        "transpose([[1, 2, 3]]) == [[1], [2], [3]]",
        "transpose([[1], [2]]) == [[1, 2]]",
    ),
    "two_sum": (
        "two_sum([2, 7, 11], 9) == (0, 1)",
        "two_sum([3, 2, 4], 6) == (1, 2)",
        "two_sum([1, 2], 9) == None",
        "two_sum([3, 3], 6) == (0, 1)",
    ),
    "words_by_length": (
        "words_by_length('a bb cc') == {1: ['a'], 2: ['bb', 'cc']}",
        "words_by_length('') == {}",
        "words_by_length('hi') == {2: ['hi']}",
    ),
}


def average(values):
    """The mean of a list of numbers; 0.0 of an empty one."""
    if len(values) == 0:
        return 0.0
    return sum(values) / len(values)


def balanced(text):
    """Whether every ( has its ) in the right order."""
    depth = 0
    for letter in text:
        if letter == "(":
            depth += 1
        elif letter == ")":
            depth -= 1
        if depth < 0:
            return False
    return depth == 0


def binary_digits(number):
    """A number of at least 0 in base 2, as text without leading zeros."""
    if number == 0:
        return "0"
    digits = ""
    while number > 0:
        digits = str(number % 2) + digits
        number = number // 2
    return digits


def clamp(value, low, high):
    """The number from low to high that is nearest to value."""
    if value < low:
        return low
    if value > high:
        return high
    return value


def collatz_steps(number):
    """How often number is halved when even, or tripled plus one when odd, until it is 1."""
    steps = 0
    while number > 1:
        if number % 2 == 0:
            number = number // 2
        else:
            number = 3 * number + 1
        steps += 1
    return steps


def common_prefix(first, second):
    """The longest text that both texts start with."""
    length = 0
    while length < len(first) and length < len(second) and first[length] == second[length]:
        length += 1
    return first[:length]


def count_vowels(text):
    """How many letters of a text are a, e, i, o or u, in either case."""
    count = 0
    for letter in text.lower():
        if letter in "aeiou":
            count += 1
    return count


def digit_sum(number):
    """The sum of the decimal digits of a number of at least 0."""
    total = 0
    while number > 0:
        total += number % 10
        number = number // 10
    return total


def distinct(values):
    """The values without repetitions, in the order of their first appearance."""
    seen = []
    for value in values:
        if value not in seen:
            seen.append(value)
    return seen


def divisors(number):
    """All positive divisors of a positive number, in ascending order."""
    found = []
    for candidate in range(1, number + 1):
        if number % candidate == 0:
            found.append(candidate)
    return found


def factorial(number):
    """The product of the numbers from 1 to number; 1 for 0."""
    product = 1
    for factor in range(2, number + 1):
        product *= factor
    return product


def fibonacci(index):
    """The Fibonacci number at an index, counted from fibonacci(0) = 0 and fibonacci(1) = 1."""
    current, following = 0, 1
    for _ in range(index):
        current, following = following, current + following
    return current


def find(values, wanted):
    """The index of the first value that equals wanted; -1 when there is none."""
    for index in range(len(values)):
        if values[index] == wanted:
            return index
    return -1


def greatest_divisor(first, second):
    """The greatest number that divides both numbers."""
    while second != 0:
        first, second = second, first % second
    return first


def is_leap_year(year):
    """Whether a year of the Gregorian calendar has 366 days."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def is_palindrome(text):
    """Whether a text reads the same in both directions."""
    left = 0
    right = len(text) - 1
    while left < right:
        if text[left] != text[right]:
            return False
        left += 1
        right -= 1
    return True


def is_prime(number):
    """Whether a number is prime."""
    if number < 2:
        return False
    divisor = 2
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 1
    return True


def is_sorted(values):
    """Whether no value is smaller than the one before it."""
    for index in range(1, len(values)):
        if values[index] < values[index - 1]:
            return False
    return True


def largest(values):
    """The largest number of a list with at least one."""
    best = values[0]
    for value in values:
        if value > best:
            best = value
    return best


def letter_counts(text):
    """How often each letter occurs in a text, by letter."""
    counts = {}
    for letter in text:
        counts[letter] = counts.get(letter, 0) + 1
    return counts


def longest_run(values):
    """The length of the longest stretch of equal neighbours; 0 for an empty list."""
    longest = 0
    length = 0
    for index in range(len(values)):
        if index > 0 and values[index] == values[index - 1]:
            length += 1
        else:
            length = 1
        longest = max(longest, length)
    return longest


def merge_sorted(first, second):
    """One ascending list of the numbers of two ascending lists."""
    merged = []
    i = 0
    j = 0
    while i < len(first) and j < len(second):
        if first[i] <= second[j]:
            merged.append(first[i])
            i += 1
        else:
            merged.append(second[j])
            j += 1
    return merged + first[i:] + second[j:]


def most_profit(prices):
    """The most that buying once and selling later earns; 0 when nothing can be earned."""
    profit = 0
    lowest = prices[0]
    for price in prices:
        profit = max(profit, price - lowest)
        lowest = min(lowest, price)
    return profit


def power(base, exponent):
    """The base multiplied by itself exponent times; 1 for the exponent 0."""
    result = 1
    while exponent > 0:
        result *= base
        exponent -= 1
    return result


def rotate(values, steps):
    """The list with its last `steps` values moved to the front, one after the other."""
    if len(values) == 0:
        return []
    steps = steps % len(values)
    return values[len(values) - steps :] + values[: len(values) - steps]


def running_total(values):
    """At each place the sum of all values up to there."""
    totals = []
    total = 0
    for value in values:
        total += value
        totals.append(total)
    return totals


def second_largest(values):
    """The largest number below the largest one; None when there is none."""
    best = None
    second = None
    for value in values:
        if best is None or value > best:
            best, second = value, best
        elif value < best and (second is None or value > second):
            second = value
    return second


def transpose(rows):
    """The columns of a table, each as a row."""
    columns = []
    for index in range(len(rows[0])):
        columns.append([row[index] for row in rows])
    return columns


def two_sum(numbers, target):
    """The first two different indices, in order, whose numbers add up to target; None when there are none."""
    for i in range(len(numbers)):
        for j in range(i + 1, len(numbers)):
            if numbers[i] + numbers[j] == target:
                return (i, j)
    return None


def words_by_length(text):
    """The words of a text by their lengths, in order of appearance."""
    groups = {}
    for word in text.split():
        if len(word) not in groups:
            groups[len(word)] = []
        groups[len(word)].append(word)
    return groups
